"""Cells drawn by weight: how often, which together, and what is refused."""

import dataclasses
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from tests.loader.sampling.epochs import counts_of, epoch_of, totals_of

from cellfeed import (
    BlockWeightedSampling,
    ClassBalancedSampling,
    ParameterError,
    SamplingStrategy,
)

keys = st.integers(0, 2**64 - 1)
WEIGHTS = st.integers(0, 9) | st.floats(0, 1e3, allow_subnormal=False) | st.sampled_from([0, 1e-9])


def expected_counts(weights: list[float], n_draws: int) -> list[Fraction]:
    """By definition, in fractions."""
    exact = [Fraction(each) for each in weights]
    return [n_draws * each / sum(exact) for each in exact]


def inclusions(weights: list[float], n_draws: int) -> list[Fraction]:
    """By definition: in proportion to weights, but at most 1, one take-all round after another."""
    exact = [Fraction(each) for each in weights]
    certain = set[int]()
    while True:
        rest = sum(each for k, each in enumerate(exact) if k not in certain)
        left = n_draws - len(certain)
        found = [
            Fraction(1) if k in certain else (left * each / rest if rest else Fraction(0))
            for k, each in enumerate(exact)
        ]
        above = {k for k, each in enumerate(found) if each > 1}
        if not above:
            return found
        certain |= above


@st.composite
def weighted(draw):
    weights = draw(st.lists(WEIGHTS, min_size=1, max_size=60))
    return weights if any(weights) else [1.0] * len(weights)


class TestWithReplacement:
    @given(weighted(), st.integers(1, 200), st.integers(1, 40), keys)
    def test_each_cell_as_often_as_expected_rounded_up_or_down(self, weights, total, block, key):
        strategy = BlockWeightedSampling(block, weights=weights, total_size=total)
        counts = counts_of(strategy, len(weights), key)
        assert counts.sum() == total
        for count, expected in zip(counts, expected_counts(weights, total), strict=True):
            assert abs(count - expected) < 1 + 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("block_size", [1, 16])
    def test_expected_draws_are_exact_over_epochs(self, block_size):
        rng = np.random.default_rng(block_size)
        weights = np.concatenate([rng.gamma(0.5, size=60), np.zeros(5), np.full(60, 0.2)])
        strategy = BlockWeightedSampling(block_size, weights=weights, total_size=90)
        n_epochs = 1500
        counts = totals_of(strategy, weights.size, n_epochs)
        expected = 90 * weights / weights.sum()
        # In an epoch it is floor or ceil; how often it is ceil is binomial.
        n_up = counts - n_epochs * np.floor(expected)
        share = expected - np.floor(expected)
        p_values = 2 * np.minimum(
            binom.cdf(n_up, n_epochs, share), binom.sf(n_up - 1, n_epochs, share)
        )
        assert p_values.min() > 1e-6

    def test_which_cells_come_together_differs_between_epochs(self):
        strategy = BlockWeightedSampling(8, weights=np.full(1000, 0.1), total_size=100)
        epochs = [frozenset(epoch_of(strategy, 1000, key).tolist()) for key in range(50)]
        assert len(set(epochs)) == 50
        assert len(frozenset().union(*epochs)) > 980

    def test_without_weights_every_cell_comes_once(self):
        assert sorted(epoch_of(BlockWeightedSampling(7), 100)) == list(range(100))

    def test_equal_weights_are_as_none(self):
        for total in (30, 100, 250):
            without = BlockWeightedSampling(7, total_size=total)
            alike = BlockWeightedSampling(7, weights=np.full(100, 0.3), total_size=total)
            for key in range(5):
                counts = counts_of(without, 100, key), counts_of(alike, 100, key)
                assert all(abs(each - total / 100).max() < 1 for each in counts)

    def test_weights_of_single_precision_are_drawn_as_what_they_are(self):
        weights = np.random.default_rng(0).random(1000, dtype=np.float32)
        short, long = (
            BlockWeightedSampling(4, weights=each) for each in (weights, weights.astype(np.float64))
        )
        assert np.array_equal(epoch_of(short, 1000), epoch_of(long, 1000))
        assert np.asarray(short.weights).nbytes == 4000

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_strategy_of_other_sizes_shares_the_weights(self, dtype):
        weights = np.random.default_rng(0).random(1000).astype(dtype)
        strategy = BlockWeightedSampling(4, weights=weights)
        again = dataclasses.replace(strategy, block_size=8)
        assert np.shares_memory(np.asarray(again.weights), np.asarray(strategy.weights))
        weights[:] = 0
        assert np.asarray(again.weights).any()


class TestWithoutReplacement:
    @given(weighted(), st.data(), st.integers(1, 40), keys)
    def test_no_cell_comes_twice_and_those_whose_weight_asks_for_it_always(
        self, weights, data, block, key
    ):
        total = data.draw(st.integers(1, int(np.count_nonzero(weights))))
        strategy = BlockWeightedSampling(block, weights=weights, total_size=total, replace=False)
        counts = counts_of(strategy, len(weights), key)
        assert counts.sum() == total
        assert counts.max() == 1
        assert not counts[np.array(weights) == 0].any()
        certain = [each == 1 for each in inclusions(weights, total)]
        # What is rounded to 2^-61 may be a little less than certain.
        assert counts[certain].all()

    @pytest.mark.slow
    @pytest.mark.parametrize(("block_size", "total"), [(1, 30), (8, 110)])
    def test_inclusion_is_in_proportion_but_at_most_one(self, block_size, total):
        rng = np.random.default_rng(total)
        weights = np.concatenate([rng.gamma(0.4, size=60), np.full(60, 0.2)])
        strategy = BlockWeightedSampling(
            block_size, weights=weights, total_size=total, replace=False
        )
        n_epochs = 1500
        counts = totals_of(strategy, weights.size, n_epochs)
        expected = np.array([float(each) for each in inclusions(weights.tolist(), total)])
        tails = binom.cdf(counts, n_epochs, expected), binom.sf(counts - 1, n_epochs, expected)
        assert 2 * np.minimum(*tails).min() > 1e-6

    def test_all_cells_where_as_many_are_asked_for(self):
        weights = [1e-300, 5e-324, 1, 1e300, 0, 3]
        strategy = BlockWeightedSampling(weights=weights, total_size=5, replace=False)
        assert counts_of(strategy, 6).tolist() == [1, 1, 1, 1, 0, 1]

    @given(weighted(), st.data(), st.integers(1, 20), keys)
    def test_rounds(self, weights, data, block, key):
        size = data.draw(st.integers(1, int(np.count_nonzero(weights))))
        total = data.draw(st.integers(1, 150))
        strategy = BlockWeightedSampling(
            block, weights=weights, total_size=total, replace=False, sampling_size=size
        )
        counts = counts_of(strategy, len(weights), key)
        assert counts.sum() == total
        assert counts.max() <= -(-total // size)

    def test_a_shorter_round_has_the_proportions_of_the_others(self):
        strategy = BlockWeightedSampling(
            1, weights=[1, 1, 1, 9], total_size=3, replace=False, sampling_size=2
        )
        counts = totals_of(strategy, 4, 400)
        # A third and 1 in the first round, half as much in the second.
        assert abs(counts - 400 * 1.5 * np.array([1 / 3, 1 / 3, 1 / 3, 1])).max() < 50

    def test_rounds_are_as_long_as_the_collection_together(self):
        strategy = BlockWeightedSampling(4, weights=[1, 2, 3, 4], replace=False, sampling_size=2)
        assert strategy.n_positions(4) == 4
        assert counts_of(strategy, 4).max() <= 2

    def test_a_round_that_is_longer_than_the_epoch(self):
        strategy = BlockWeightedSampling(
            weights=[1, 0, 2], total_size=2, replace=False, sampling_size=9
        )
        assert counts_of(strategy, 3).tolist() == [1, 0, 1]

    @given(weighted(), st.integers(1, 50), st.integers(1, 150), st.integers(1, 20), keys)
    def test_rounds_with_replacement(self, weights, size, total, block, key):
        """In each round, a cell comes as often as expected, rounded up or down."""
        strategy = BlockWeightedSampling(
            block, weights=weights, total_size=total, sampling_size=size
        )
        counts = counts_of(strategy, len(weights), key)
        assert counts.sum() == total
        sizes = [size] * (total // size) + [total % size]
        for k, count in enumerate(counts.tolist()):
            expected = [expected_counts(weights, each)[k] for each in set(sizes)]
            of_round = dict(zip(set(sizes), expected, strict=True))
            assert abs(count - sum(of_round[each] for each in sizes)) < len(sizes) * (1 + 1e-6)


def gaps(strategy: SamplingStrategy, n_rows: int, block_size: int, key: int = 0) -> np.ndarray:
    """Distances of draws in storage within the blocks of an epoch, all of which are whole."""
    blocks = np.sort(epoch_of(strategy, n_rows, key).reshape(-1, block_size), axis=1)
    return np.diff(blocks, axis=1)


class TestBlocks:
    @pytest.mark.parametrize("share", [1, 2, 10, 100])
    @pytest.mark.parametrize("replace", [True, False])
    def test_draws_of_a_block_lie_side_by_side(self, share, replace):
        n_rows, block = 16_000, 16
        weights = np.full(n_rows, 0.7)
        strategy = BlockWeightedSampling(
            block, weights=weights, total_size=n_rows // share, replace=replace
        )
        # All but where a window wraps around its stretch.
        assert np.mean(gaps(strategy, n_rows, block) == 1) > 0.85

    def test_also_where_classes_differ_in_weight(self):
        labels = np.repeat([0, 1, 2], [100_000, 10_000, 1_000])
        strategy = ClassBalancedSampling(labels, block_size=16, total_size=9_600)
        of_class = {
            each: gaps(strategy, labels.size, 16)[
                labels[epoch_of(strategy, labels.size).reshape(-1, 16)[:, 0]] == each
            ]
            for each in range(3)
        }
        assert np.mean(of_class[0] == 1) > 0.85
        assert np.mean(of_class[1] == 1) > 0.85
        assert np.mean(of_class[2] == 0) > 0.6  # 3.2 times each

    def test_blocks_come_in_random_order(self):
        strategy = BlockWeightedSampling(4, weights=np.ones(4000))
        firsts = epoch_of(strategy, 4000).reshape(-1, 4).min(axis=1)
        assert abs(np.corrcoef(firsts, np.arange(1000))[0, 1]) < 0.2


class TestLargeCollections:
    def test_a_billion_cells_alike_need_no_memory(self):
        strategy = BlockWeightedSampling(8, total_size=10**7, replace=False)
        order = strategy.epoch_order(n_rows=10**9, epoch_key=0)
        drawn = order(np.arange(10**7 - 4096, 10**7))
        assert np.unique(drawn).size == 4096
        assert drawn.max() < 10**9

    @pytest.mark.slow
    def test_sums_of_ten_million_weights_are_exact(self):
        # In float32, a sum of ones stops at 2^24, and small weights beside large ones are lost.
        n = 20_000_000
        weights = np.ones(n, np.float32)
        weights[: n // 2] = 2.0**-30
        strategy = BlockWeightedSampling(64, weights=weights, total_size=n // 2)
        drawn = strategy.epoch_order(n_rows=n, epoch_key=1)(np.arange(0, n // 2, 97))
        expected = n // 2 / (1 + 2.0**-30)
        # Each cell of the upper half comes once but for some 0.01.
        upper = drawn[drawn >= n // 2]
        assert upper.size >= drawn.size - 1
        assert np.unique(upper).size == upper.size
        assert expected < n // 2

    def test_prepared_once_and_little_is_kept(self):
        weights = np.ones(1 << 20)
        strategy = BlockWeightedSampling(weights=weights)
        size = len(pickle.dumps(strategy))
        assert size < weights.nbytes * (1 + 1 / 8)


TWO = {"weights": [1, 0, 2], "replace": False}  # cells may be drawn


NOT_DRAWN: list[tuple[dict[str, Any], str]] = [
    ({"weights": [1, -1]}, r"weights\[1\] is -1.0"),
    ({"weights": [1, float("nan")]}, r"weights\[1\] is nan"),
    ({"weights": [float("inf"), 1]}, r"weights\[0\] is inf"),
    ({"weights": [0, 0, 0]}, "none of 3 cells has a weight above 0"),
    ({"weights": []}, r"one-dimensional numbers.*shape \(0,\)"),
    ({"weights": ["a", "b"]}, "one-dimensional numbers"),
    ({"weights": [[1, 2]]}, r"one-dimensional numbers.*shape \(1, 2\)"),
    ({"weights": 1.0}, "one-dimensional numbers"),
    ({"total_size": 2**41}, "`total_size <= 1099511627776` must hold"),
    ({"total_size": 3, **TWO}, "`total_size <= 2` .*got total_size=3"),
    ({"sampling_size": 3, **TWO}, "`sampling_size <= 2` .*got sampling_size=3"),
    (TWO, "needs `total_size` or `sampling_size`"),
]


class TestBadParameters:
    @pytest.mark.parametrize(("options", "message"), NOT_DRAWN)
    def test_weights_and_draws(self, options, message):
        with pytest.raises(ParameterError, match=message) as raised:
            BlockWeightedSampling(**options)
        assert "\n" not in str(raised.value)

    def test_more_draws_than_rows(self):
        with pytest.raises(ParameterError, match=r"`total_size <= 5`"):
            BlockWeightedSampling(total_size=6, replace=False).n_positions(5)

    @pytest.mark.parametrize(
        "labels", [[None, None], [-1, -1], np.array([np.nan]), pd.Categorical([None])]
    )
    def test_labels_that_are_all_missing(self, labels):
        with pytest.raises(ParameterError, match="are missing"):
            ClassBalancedSampling(labels)

    def test_labels_that_are_missing_among_the_indices(self):
        with pytest.raises(ParameterError, match="none of 2 cells has a label"):
            ClassBalancedSampling([0, -1, -1, 1], indices=[1, 2])

    @pytest.mark.parametrize("labels", [[], [[1, 2]], {"a": 1}, 3])
    def test_labels_that_are_no_line(self, labels):
        with pytest.raises(ParameterError, match="`labels` must be one-dimensional"):
            ClassBalancedSampling(labels)

    @pytest.mark.parametrize(
        "make",
        [
            lambda n, **kw: BlockWeightedSampling(weights=np.ones(n), **kw),
            lambda n, **kw: ClassBalancedSampling(np.zeros(n, int), **kw),
        ],
    )
    def test_lengths(self, make):
        told = r"must have one value .* row .* \(11\), but got 10"
        with pytest.raises(ParameterError, match=told):
            make(10).n_positions(11)
        assert make(10, indices=[3, 4]).n_positions(10) == 2
        assert make(2, indices=[3, 4]).n_positions(10) == 2
        told = r"\(12\), or for each of `indices` \(2\), but got 10"
        with pytest.raises(ParameterError, match=told):
            make(10, indices=[3, 4]).n_positions(12)
        with pytest.raises(ParameterError, match="but got 3 and an index 4"):
            make(3, indices=[3, 4])

    @pytest.mark.parametrize("name", ["block_size", "total_size", "sampling_size"])
    @pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
    def test_sizes(self, name, value):
        with pytest.raises(ParameterError, match=f"`{name}"):
            BlockWeightedSampling(**{name: value}, replace=False)
