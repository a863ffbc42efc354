"""Epochs of drawn cells and of sets: their order, and the rest of one that was stopped."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.dataset.stopped import in_parts
from tests.loader.sampling.epochs import epoch_of
from tests.loader.sampling.test_rest import MOST_ROWS, SIZES, check_rows

from cellfeed import (
    BlockWeightedSampling,
    CellDataset,
    ClassBalancedSampling,
    EpochPlan,
    GroupedSampling,
    SamplingStrategy,
)

WEIGHTS = [0, 1, 2, 3, 4, 0.5] * 4
GOLDEN: dict[str, tuple[SamplingStrategy, list[int]]] = {
    "weighted": (
        BlockWeightedSampling(4, weights=WEIGHTS),
        [21, 7, 22, 19, 21, 4, 22, 16, 20, 16, 8, 4, 15, 3, 13, 3, 10, 1, 9, 15, 10, 9, 14, 2],
    ),
    "without replacement": (
        BlockWeightedSampling(4, weights=WEIGHTS, total_size=12, replace=False),
        [9, 4, 15, 21, 10, 3, 14, 16, 22, 19, 7, 1],
    ),
    "balanced": (
        ClassBalancedSampling(np.repeat([0, 1, 2], [15, 6, 3]), 4),
        [22, 11, 23, 21, 22, 9, 23, 21, 22, 21, 13, 7, 20, 6, 18, 4, 16, 0, 15, 19, 17, 15, 18, 2],
    ),
    "sets": (
        GroupedSampling(np.repeat([0, 1, 2], [12, 8, 4]), 3),
        [12, 13, 16, 18, 19, 17, 23, 21, 20, 5, 0, 6, 8, 11, 1, 10, 9, 3, 7, 4, 2],
    ),
}


@pytest.mark.parametrize(("strategy", "expected"), GOLDEN.values(), ids=GOLDEN)
def test_golden_order(strategy, expected):
    """Golden: pins the order across versions; a run that is resumed relies on it.

    If this fails, training runs cannot be resumed across the change. Say so in CHANGELOG.md.
    """
    sizes: dict[str, Any] = {"n_rows": 24, "batch_size": 6, "fetch_factor": 2}
    plan = EpochPlan(strategy=strategy, seed=42, epoch=3, **sizes)
    rows = [plan.delivered_rows(number)[0].tolist() for number in range(plan.n_fetches)]
    assert [*itertools.chain(*rows)] == expected


@settings(max_examples=15)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40).map(sorted), st.integers(0, 2**64 - 1))
def test_a_row_that_is_given_twice_counts_twice(indices, key):
    labels = np.zeros(31)
    for strategy in (
        BlockWeightedSampling(3, indices),
        BlockWeightedSampling(3, indices, labels + 1, len(indices), replace=False),
        ClassBalancedSampling(labels, 3, indices),
        ClassBalancedSampling(labels, 3, indices, len(indices), replace=False),
        GroupedSampling(labels, 1, 1, indices),
    ):
        rows = np.sort(epoch_of(strategy, 31, key))
        assert rows.tolist() == indices


@pytest.mark.slow
@given(sizes=SIZES, data=st.data())
def test_no_draw_comes_twice_and_none_is_missing(sizes, data):
    """What is divided are positions; that a row may be at several makes no difference."""
    weighted = BlockWeightedSampling(3, weights=np.arange(1, MOST_ROWS + 1), total_size=50)
    check_rows(sizes | {"strategy": weighted, "n_rows": MOST_ROWS}, data)


@pytest.mark.slow
@given(set_size=st.integers(1, 3), sizes=SIZES, data=st.data())
def test_sets_stay_whole(set_size, sizes, data):
    labels = np.arange(60) % 3
    sizes = sizes | {
        "strategy": GroupedSampling(labels, set_size=set_size),
        "n_rows": labels.size,
        "batch_size": sizes["batch_size"] * set_size,
    }
    for minibatch in check_rows(sizes, data, set_size):
        sets = labels[minibatch].reshape(-1, set_size)
        assert (sets == sets[:, :1]).all()


def _dataset(n_rows: int, rank: int = 0, world_size: int = 1, **options: Any) -> CellDataset:
    options = {"rank": rank, "world_size": world_size, "seed": 5} | options
    return CellDataset(np.arange(n_rows), **options)


_LABELS = np.random.default_rng(0).integers(0, 4, 60)
_DRAWN = {
    "by weight": BlockWeightedSampling(3, weights=_LABELS + 1),
    "in equal shares": ClassBalancedSampling(_LABELS, 3),
    "once": ClassBalancedSampling(_LABELS, 3, total_size=25, replace=False),
    "in sets": GroupedSampling(_LABELS, set_size=3),
}


@pytest.mark.slow
@given(strategy=st.sampled_from(sorted(_DRAWN)), n_together=st.integers(1, 3), data=st.data())
def test_what_is_drawn_is_divided_anew(strategy, n_together, data):
    """As often as the epoch draws it, but for what makes ranks equal; and sets stay whole."""
    drawn = _DRAWN[strategy]
    options = {"strategy": drawn, "batch_size": n_together * drawn.n_together, "fetch_factor": 2}
    expected = Counter(row for each in _dataset(60, **options) for row in each.tolist())
    found, n_added = in_parts(
        data.draw, lambda rank, ranks: _dataset(60, rank, ranks, **options), most=3
    )
    for minibatch in found:
        sets = minibatch.reshape(-1, drawn.n_together)
        assert (_LABELS[sets] == _LABELS[sets[:, :1]]).all()
    seen = Counter(np.concatenate(found).tolist())
    assert not expected - seen
    assert seen.total() - expected.total() <= n_added * drawn.n_together


STATES = json.loads(Path(__file__).with_name("golden_states.json").read_text())


@pytest.mark.parametrize("golden", STATES, ids=lambda golden: golden["name"])
def test_states_that_were_written_go_on(golden: dict[str, Any]) -> None:
    """The order is pinned; see golden_states.json."""
    classes = ClassBalancedSampling(np.arange(1000) // 7 % 3, block_size=4)
    n_ranks = len(golden["rows"])
    for rank, expected in enumerate(golden["rows"]):
        options = {"strategy": classes, "batch_size": 16, "fetch_factor": 4, "seed": 7}
        resumed = _dataset(1000, rank, n_ranks, **options)
        resumed.load_state_dict(golden["state"])
        assert next(iter(resumed)).tolist() == expected
