"""Sets of cells of one group: whole, in every minibatch, as often as asked for."""

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import (
    CellDataset,
    ColumnError,
    EpochPlan,
    GroupedSampling,
    ParameterError,
    open_collection,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* fewer cells than set_size:UserWarning")

keys = st.integers(0, 2**64 - 1)


def sets_of(strategy: GroupedSampling, n_rows: int, key: int = 0) -> np.ndarray:
    positions = np.arange(strategy.n_positions(n_rows)).reshape(-1, strategy.set_size)
    return strategy.epoch_order(n_rows=n_rows, epoch_key=key)(positions)


@st.composite
def grouped(draw, *, fills=None):
    """Labels, the size of sets, and of blocks; if required, a "group" fills a set."""
    labels = np.array([draw(st.integers(0, 4)), *draw(st.lists(st.integers(-1, 4), max_size=59))])
    sizes = np.bincount(labels[labels >= 0])
    most = {None: 16, "group": int(sizes.max())}[fills]
    block_size = draw(st.integers(1, min(4, most)))
    return labels, draw(st.integers(1, min(4, most // block_size))) * block_size, block_size


@given(grouped(fills="group"))
def test_cells_that_no_epoch_visits_are_told(case):
    labels, size, _ = case
    sizes = np.bincount(labels[labels >= 0])
    lost = sizes[(sizes > 0) & (sizes < size)]
    for leftover in ("drop", "pad"):
        with warnings.catch_warnings(record=True, action="always") as caught:
            GroupedSampling(labels, size, leftover=leftover)
        told = [str(each.message) for each in caught if "set_size" in str(each.message)]
        assert len(told) == (leftover == "drop" and lost.size > 0)
        for each in told:
            assert each.startswith("1 group has" if lost.size == 1 else f"{lost.size} groups have")
            assert f"{lost.sum()} of {sizes.sum()} cells are never visited" in each
            assert caught[0].filename == __file__


class TestSets:
    @given(grouped(fills="group"), keys)
    def test_are_of_one_group_and_leave_out_what_fills_none(self, case, key):
        labels, size, block_size = case
        sizes = np.bincount(labels[labels >= 0])
        sets = sets_of(GroupedSampling(labels, size, block_size), labels.size, key)
        groups = labels[sets]
        assert (groups == groups[:, :1]).all()
        assert np.unique(sets).size == sets.size
        assert np.bincount(groups[:, 0], minlength=sizes.size).tolist() == (sizes // size).tolist()

    @given(grouped(), keys)
    def test_are_filled_with_cells_of_their_group(self, case, key):
        labels, size, block_size = case
        strategy = GroupedSampling(labels, size, block_size, leftover="pad")
        sets = sets_of(strategy, labels.size, key)
        groups = labels[sets]
        assert (groups == groups[:, :1]).all()
        sizes = np.bincount(labels[labels >= 0])
        n_sets = -(-sizes // size)
        assert np.bincount(groups[:, 0], minlength=sizes.size).tolist() == n_sets.tolist()
        counts = np.bincount(sets.ravel(), minlength=labels.size)
        for group in np.unique(labels[labels >= 0]):
            n = n_sets[group] * size
            often = {n // sizes[group], -(-n // sizes[group])}
            assert set(counts[labels == group].tolist()) == often
        assert not counts[labels < 0].any()
        n_distinct = [np.unique(each).size for each in sets]
        assert n_distinct == np.minimum(size, sizes[groups[:, 0]]).tolist()

    @pytest.mark.parametrize("block_size", [1, 2, 4])
    def test_are_made_of_blocks_of_neighbours_in_the_group(self, block_size):
        labels = np.tile([0, 1, 2], 400)
        sets = sets_of(GroupedSampling(labels, 8, block_size), 1200)
        blocks = sets.reshape(-1, block_size)
        wrapped = np.diff(blocks, axis=1) < 0
        assert wrapped.sum() <= 3  # once in each group
        assert (np.diff(blocks, axis=1)[~wrapped] == 3).all()
        if block_size == 1:
            assert np.mean(np.diff(sets, axis=1) == 3) < 0.1

    def test_come_in_random_order_and_differ_between_epochs(self):
        labels = np.repeat([0, 1], 400)
        strategy = GroupedSampling(labels, 8)
        epochs = [sets_of(strategy, 800, key) for key in range(20)]
        for sets in epochs:
            n_changes = np.count_nonzero(np.diff(labels[sets[:, 0]]))
            assert 25 < n_changes < 75
        as_sets = {frozenset(each) for sets in epochs for each in sets.tolist()}
        assert len(as_sets) == 20 * 100

    @pytest.mark.parametrize("n_groups", [1, 70_000])
    def test_of_few_and_of_many_groups(self, n_groups):
        labels = np.random.default_rng(0).permutation(np.repeat(np.arange(n_groups), 3))
        sets = sets_of(GroupedSampling(labels, 3), labels.size)
        assert (np.diff(labels[sets], axis=1) == 0).all()
        assert np.unique(sets).size == labels.size

    @pytest.mark.slow
    def test_every_cell_of_a_group_is_as_likely_to_be_left_out(self):
        labels = np.zeros(11, int)
        n_epochs = 2000
        strategy = GroupedSampling(labels, 4, 2)
        counts = np.bincount(
            np.concatenate([sets_of(strategy, 11, key).ravel() for key in range(n_epochs)])
        )
        expected = n_epochs * 8 / 11
        assert abs(counts - expected).max() < 5 * np.sqrt(n_epochs * 8 / 11 * 3 / 11)


def test_sets_are_mixed_within_a_fetch():
    labels = np.repeat(np.arange(50), 40)
    plan = EpochPlan(
        strategy=GroupedSampling(labels, 8), n_rows=2000, batch_size=32, fetch_factor=8
    )
    positions = np.arange(256).reshape(-1, 8)
    rows = plan.delivered_rows(0)[0].reshape(-1, 8)
    in_order = {tuple(each): k for k, each in enumerate(rows.tolist())}
    unshuffled = dataclasses.replace(plan, batch_size=8, fetch_factor=1)
    order = [in_order[tuple(unshuffled.delivered_rows(k)[0].tolist())] for k in range(32)]
    assert sorted(order) == list(range(positions.shape[0]))
    assert order != sorted(order)


class TestWeights:
    def test_equal(self):
        labels = np.repeat([0, 1, 2], [600, 60, 8])
        strategy = GroupedSampling(labels, 8, weights="equal", n_sets=90)
        groups = labels[sets_of(strategy, 668)]
        assert np.bincount(groups[:, 0]).tolist() == [30, 30, 30]
        assert (groups == groups[:, :1]).all()
        assert strategy.n_positions(668) == 720

    def test_a_group_that_begins_anew_does_so_in_other_sets(self):
        labels = np.repeat([0, 1], [800, 80])
        sets = sets_of(GroupedSampling(labels, 8, weights="equal", n_sets=200), 880)
        rare = np.sort(sets[labels[sets[:, 0]] == 1], axis=1)
        counts = np.bincount(rare.ravel())[800:]
        assert (counts == 10).all()
        assert np.unique(rare, axis=0).shape[0] > 90

    def test_a_group_that_fills_no_set_does_not_come(self):
        labels = np.repeat([0, 1, 2, -1], [600, 60, 6, 10])
        groups = labels[sets_of(GroupedSampling(labels, 8, weights="equal", n_sets=100), 676)][:, 0]
        assert np.bincount(groups).tolist() == [50, 50]

    def test_sets_of_a_long_epoch_take_no_memory(self):
        strategy = GroupedSampling([0, 1, 0, 1], 2, weights="equal", n_sets=10**12)
        order = strategy.epoch_order(n_rows=4, epoch_key=0)
        rows = order(np.arange(2 * 10**12 - 2000, 2 * 10**12)).reshape(-1, 2)
        assert (np.sort(rows, axis=1) % 2 == rows[:, :1] % 2).all()
        assert abs(np.count_nonzero(rows[:, 0] % 2) - 500) < 100

    @pytest.mark.slow
    def test_expected_number_is_exact_over_epochs(self):
        labels = np.repeat(np.arange(4), [20, 5, 40, 10])
        strategy = GroupedSampling(labels, 5, weights="equal", n_sets=7)
        n_epochs = 1500
        counts = np.zeros(4)
        for key in range(n_epochs):
            counts += np.bincount(labels[sets_of(strategy, 75, key)][:, 0], minlength=4)
        assert abs(counts / n_epochs - 7 / 4).max() < 5 * 0.5 / np.sqrt(n_epochs)


class TestLabels:
    def test_of_several_obs_columns(self, plates):
        collection = open_collection(plates, obs=["plate", "cell_type"])
        strategy = GroupedSampling(("plate", "cell_type"), 4)
        dataset = CellDataset(collection, strategy, 8, seed=0)
        n_sets = 0
        for batch in dataset:
            pairs = np.stack(
                [np.asarray(batch.obs[name]) for name in ("plate", "cell_type")], axis=1
            )
            for first in range(0, len(pairs), 4):
                assert (pairs[first : first + 4] == pairs[first]).all()
                n_sets += 1
        codes = [np.asarray(collection.obs[name].values) for name in ("plate", "cell_type")]
        _, sizes = np.unique(np.stack(codes), axis=1, return_counts=True)
        assert n_sets == (sizes // 4).sum()

    def test_among_indices(self, plates):
        collection = open_collection(plates, obs=["plate"])
        indices = np.arange(30, 63)
        by_name = GroupedSampling("plate", 3, indices=indices).bound_to(collection)
        labels = np.repeat([0, 1], [37, 26])
        for strategy in (
            by_name,
            GroupedSampling(labels, 3, indices=indices),
            GroupedSampling(labels[indices], 3, indices=indices),
        ):
            sets = sets_of(strategy, 63)
            assert np.isin(sets, indices).all()
            assert np.array_equal(sets, sets_of(by_name, 63))

    def test_are_needed(self, plates):
        with pytest.raises(ParameterError, match="is not read yet"):
            GroupedSampling("plate", 3).n_positions(63)
        with pytest.raises(ColumnError, match="obs has no column 'line'"):
            CellDataset(open_collection(plates, obs=["plate"]), GroupedSampling("line", 2), 8)


@pytest.mark.parametrize("name", ["set_size", "block_size", "n_sets"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_sizes_that_are_none(name, value):
    with pytest.raises(ParameterError, match=f"`{name}"):
        GroupedSampling([0, 0], **({"set_size": 1, "weights": "equal"} | {name: value}))


NOT_SAMPLED: list[tuple[list[int], dict[str, Any], str]] = [
    ([0] * 8, {"set_size": 6, "block_size": 4}, "`set_size` must be a multiple of `block_size`"),
    ([0, 0], {"leftover": "keep"}, r"one of 'drop', 'pad', but got 'k"),
    ([0, 0], {"n_sets": 3}, "n_sets=3 needs `weights`"),
    ([0, 0, 1], {"set_size": 3}, r"`set_size <= 2` .* got set_size=3; or fill"),
    ([0, -1], {"set_size": 1, "indices": [1]}, "none of 1 cells has a label"),
    ([0, 0], {}, "`labels` must have one value for each row .* but got 2"),
    ([0, 0, 1], {"weights": [0, 0, 1]}, "`weights` must be 'equal' or None, .* draws cells by w"),
    ([0, 0, 1], {"weights": "even"}, "`weights` must be one of 'equal', None, but got 'even'"),
    ([0] * 100, {"set_size": 8}, "multiple of 8, .*, but got batch_size=12"),
]


@pytest.mark.parametrize(("labels", "options", "message"), NOT_SAMPLED)
def test_what_cannot_be_sampled(labels, options, message):
    with pytest.raises(ParameterError, match=message):
        CellDataset(np.arange(100), GroupedSampling(labels, **{"set_size": 2} | options), 12)
