"""Strategies that draw cells, or visit sets of them, pass the suite of any strategy."""

import numpy as np
import pytest
from hypothesis import strategies as st
from tests.loader.sampling.suites import PlanConformance
from tests.loader.testing.test_strategy_conformance import some_rows

from cellfeed import BlockWeightedSampling, ClassBalancedSampling, GroupedSampling
from cellfeed.testing import StrategyCase


class TestBlockWeightedSampling(PlanConformance):
    @pytest.fixture
    def cases(self):
        @st.composite
        def cases(draw, n_rows):
            indices = draw(some_rows(n_rows))
            n = n_rows if indices is None else indices.size
            rng = np.random.default_rng(draw(st.integers(0, 99)))
            weights = draw(st.sampled_from([None, rng.gamma(0.3, size=n), np.ones(n_rows)]))
            total, replace = draw(st.integers(1, n)), draw(st.booleans())
            size = None if replace else draw(st.none() | st.integers(1, total))
            return StrategyCase(
                strategy=BlockWeightedSampling(
                    draw(st.integers(1, 40)), indices, weights, total, replace, size
                ),
                n_rows=n_rows,
                rows=indices,
                n_positions=total,
                is_repeating=replace or size is not None,
            )

        return cases


class TestClassBalancedSampling(PlanConformance):
    @pytest.fixture
    def cases(self):
        @st.composite
        def cases(draw, n_rows):
            indices = draw(some_rows(n_rows))
            n = n_rows if indices is None else indices.size
            n_labels, seed = draw(st.sampled_from([1, 3, 40])), draw(st.integers(0, 99))
            labels = np.random.default_rng(seed).integers(-1, n_labels, n)
            labels[0] = 0
            total, replace = draw(st.none() | st.integers(1, 2 * n)), draw(st.booleans())
            if not replace:
                total = draw(st.integers(1, int(np.count_nonzero(labels >= 0))))
            labelled = np.flatnonzero(labels >= 0)
            return StrategyCase(
                strategy=ClassBalancedSampling(
                    labels, draw(st.integers(1, 40)), indices, total, replace=replace
                ),
                n_rows=n_rows,
                rows=labelled if indices is None else indices[labelled],
                n_positions=n if total is None else total,
                is_repeating=replace,
            )

        return cases


@pytest.mark.filterwarnings("ignore:.* fewer cells than set_size:UserWarning")
class TestGroupedSampling(PlanConformance):
    @pytest.fixture
    def cases(self):
        @st.composite
        def cases(draw, n_rows):
            indices = draw(some_rows(n_rows))
            n = n_rows if indices is None else indices.size
            labels = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 5, n)
            block_size, leftover = (
                draw(st.integers(1, 3)),
                draw(st.sampled_from(["drop", "pad"])),
            )
            size = block_size * draw(st.integers(1, 4))
            weights = draw(st.sampled_from([None, "equal"]))
            n_sets = None if weights is None else draw(st.none() | st.integers(1, 2 * n))
            if np.bincount(labels).max() < size:
                leftover = "pad"
            of_group = np.bincount(labels) // size
            if leftover == "pad":
                of_group = -(-np.bincount(labels) // size)
            return StrategyCase(
                strategy=GroupedSampling(
                    labels, size, block_size, indices, leftover, weights, n_sets
                ),
                n_rows=n_rows,
                rows=indices,
                n_positions=(n_sets or int(of_group.sum())) * size,
                is_repeating=leftover == "pad" or weights is not None,
            )

        return cases
