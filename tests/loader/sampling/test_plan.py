import copy
import dataclasses
import pickle
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import (
    BlockShuffling,
    CellDataset,
    EpochPlan,
    ParameterError,
    SamplingStrategy,
    Streaming,
)


def fetches(plan: EpochPlan) -> list[np.ndarray]:
    return [plan.delivered_rows(number)[0] for number in range(plan.n_fetches)]


def delivered(plan: EpochPlan) -> list[int]:
    return [row for fetch in fetches(plan) for row in fetch.tolist()]


def minibatch_sizes(plan: EpochPlan) -> list[int]:
    """The sizes that come out when each fetch is cut into minibatches."""
    size = plan.batch_size
    return [
        len(fetch[start : start + size])
        for fetch in fetches(plan)
        for start in range(0, fetch.size, size)
    ]


def shuffling_plan(**parameters) -> EpochPlan:
    defaults: dict[str, Any] = {
        "strategy": BlockShuffling(block_size=4),
        "n_rows": 200,
        "batch_size": 8,
        "fetch_factor": 3,
    }
    return EpochPlan(**(defaults | parameters))


# A strategy, sizes of the collection and of minibatches, and what all ranks get.
GOLDEN: dict[str, tuple[SamplingStrategy, dict[str, Any], list[int]]] = {
    "blocks": (
        BlockShuffling(4),
        {"n_rows": 23, "batch_size": 3, "world_size": 2},
        [1, 22, 2, 21, 0, 20, 9, 19, 18, 8, 17, 10, 4, 7, 3, 5, 16, 6, 12, 20, 15, 13, 11, 14],
    ),
}


@pytest.mark.parametrize(("strategy", "sizes", "expected"), GOLDEN.values(), ids=GOLDEN)
def test_golden_order(strategy, sizes, expected):
    """Golden: pins the order across versions; a run that is resumed relies on it.

    If this fails, training runs cannot be resumed across the change. Say so in CHANGELOG.md.
    """
    plan = EpochPlan(strategy=strategy, fetch_factor=2, seed=42, epoch=3, **sizes)
    ranks = [dataclasses.replace(plan, rank=rank) for rank in range(plan.world_size)]
    assert [row for each in ranks for row in delivered(each)] == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_thousand_ranks(drop_last):
    n_rows, n_ranks = 20_011, 1_000
    plans = [
        shuffling_plan(n_rows=n_rows, world_size=n_ranks, rank=rank, drop_last=drop_last)
        for rank in range(n_ranks)
    ]
    sizes = minibatch_sizes(plans[0])
    assert all(minibatch_sizes(plan) == sizes for plan in plans)
    counts = Counter(row for plan in plans for row in delivered(plan))
    if drop_last:
        assert max(counts.values()) == 1
        assert n_rows - counts.total() < n_ranks * plans[0].batch_size
    else:
        assert len(counts) == n_rows
        assert counts.total() - n_rows < n_ranks


def test_asking_beyond_the_end_is_an_error():
    plan = shuffling_plan()
    for first, n in [(-1, 1), (plan.n_fetches, 1), (0, plan.n_whole_fetches + 2)]:
        with pytest.raises(IndexError, match=f"this epoch has {plan.n_fetches}"):
            plan.delivered_rows(first, n)


class TestOrder:
    @given(st.integers(1, 100), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
    def test_streaming_ranks_take_turns_in_storage_order(self, n_rows, batch, factor, world_size):
        parameters = {"n_rows": n_rows, "batch_size": batch, "fetch_factor": factor}
        plans = [
            EpochPlan(strategy=Streaming(), rank=rank, world_size=world_size, **parameters)
            for rank in range(world_size)
        ]
        rounds = zip(*(fetches(plan) for plan in plans), strict=True)
        in_turns = [row for fetches_ in rounds for fetch in fetches_ for row in fetch.tolist()]
        n_repeated = -n_rows % world_size
        assert in_turns == [*range(n_rows), *np.resize(np.arange(n_rows), n_repeated).tolist()]

    def test_streaming_with_a_buffer_shuffles_within_each_fetch_only(self):
        plan = shuffling_plan(strategy=Streaming(shuffle=True))
        for number, fetch in enumerate(fetches(plan)):
            start = number * plan.fetch_size
            stop = min(200, start + plan.fetch_size)
            assert fetch.tolist() != list(range(start, stop))
            assert sorted(fetch.tolist()) == list(range(start, stop))

    def test_blocks_are_mixed_within_a_fetch(self):
        (first, *_) = fetches(shuffling_plan(n_rows=24 * 50, fetch_factor=50))
        # In an order without blocks, a row is followed by the next one in 1 of 1200 places.
        assert np.count_nonzero(np.diff(first) == 1) < 10

    @pytest.mark.parametrize(
        "strategy",
        [BlockShuffling(4), BlockShuffling(4, drop_last=True), Streaming(shuffle=True)],
        ids=["blocks", "whole blocks", "buffer"],
    )
    def test_differs_between_epochs_and_seeds_and_is_the_same_for_the_same(self, strategy):
        orders = {
            (seed, epoch): tuple(
                delivered(shuffling_plan(strategy=strategy, seed=seed, epoch=epoch))
            )
            for seed in range(3)
            for epoch in range(3)
        }
        assert len(set(orders.values())) == len(orders)
        again = tuple(delivered(shuffling_plan(strategy=strategy, seed=2, epoch=1)))
        assert again == orders[2, 1]

    def test_ranks_mix_between_epochs(self):
        of_first_rank = [
            set(delivered(shuffling_plan(world_size=2, epoch=epoch))) for epoch in range(4)
        ]
        assert all(len(rows) == 100 for rows in of_first_rank)
        assert len(set(map(frozenset, of_first_rank))) == 4
        assert len(set.union(*of_first_rank)) > 150

    def test_the_dropped_tail_differs_between_epochs(self):
        tails = set()
        for epoch in range(5):
            plan = shuffling_plan(n_rows=203, drop_last=True, epoch=epoch)
            tails.add(frozenset(range(203)) - set(delivered(plan)))
        assert len(tails) == 5


@dataclasses.dataclass(frozen=True, eq=False)
class Reversed(SamplingStrategy):
    """Visits the rows backwards, and notes for which keys it prepared an epoch."""

    keys: list[int] = dataclasses.field(default_factory=list)

    shuffles_fetch = False

    def n_positions(self, n_rows):
        return n_rows

    def epoch_order(self, *, n_rows, epoch_key):
        self.keys.append(epoch_key)
        return lambda positions: n_rows - 1 - positions  # which cannot be pickled


class TestPreparing:
    def test_is_not_done_for_lengths_and_once_for_all_fetches_of_a_plan(self):
        strategy = Reversed()
        plan = shuffling_plan(strategy=strategy)
        assert plan.n_minibatches == 25
        assert not strategy.keys
        assert delivered(plan) == list(range(200))[::-1]
        assert plan.fetch(3).rows.size == plan.fetch_size
        assert len(strategy.keys) == 1

    def test_is_done_anew_for_another_epoch_seed_or_copy(self):
        strategy = Reversed()
        plan = shuffling_plan(strategy=strategy)
        others = [dataclasses.replace(plan, epoch=1), dataclasses.replace(plan, seed=1)]
        for each in (plan, *others, dataclasses.replace(plan)):
            each.fetch(0)
        assert len(strategy.keys) == 4
        assert len(set(strategy.keys)) == 3

    @pytest.mark.parametrize("copied", [copy.copy, lambda plan: pickle.loads(pickle.dumps(plan))])
    def test_is_left_behind_by_copies(self, copied):
        plan = shuffling_plan(strategy=Reversed())
        plan.fetch(0)
        again = copied(plan)
        assert delivered(again) == delivered(plan)
        assert dataclasses.replace(again, strategy=plan.strategy) == plan

    def test_is_not_part_of_the_value(self):
        plan = shuffling_plan(strategy=Streaming())
        fresh = dataclasses.replace(plan)
        plan.fetch(0)
        assert (plan, hash(plan), repr(plan)) == (fresh, hash(fresh), repr(fresh))


class Rows:
    """A billion rows that take no room."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, rows):
        return rows


@pytest.mark.parametrize(
    "strategy",
    [Streaming(), BlockShuffling(1), BlockShuffling(7), BlockShuffling(7, drop_last=True)],
    ids=["streaming", "rows", "blocks", "whole blocks"],
)
def test_a_billion_rows_need_no_memory(strategy):
    tracemalloc.start()  # counts what NumPy allocates
    try:
        dataset = CellDataset(Rows(), strategy, 64, 16, rank=2, world_size=3, seed=0)
        first = next(iter(dataset))
        last = dataset.plan(epoch=0).fetch(dataset.plan(epoch=0).n_fetches - 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert first.size == 64
    assert last.rows.size > 0
    assert peak < 50e6


class TestBadParameters:
    @pytest.mark.parametrize("name", ["n_rows", "batch_size", "fetch_factor", "world_size"])
    @pytest.mark.parametrize("value", [0, -3, 2.0, float("nan"), True, np.True_, "4", None])
    def test_sizes(self, name, value):
        with pytest.raises(ParameterError, match=rf"^`{name}.* but got {name}="):
            shuffling_plan(**{name: value})

    @pytest.mark.parametrize("rank", [-1, 2, 0.5, True, "0"])
    def test_rank(self, rank):
        with pytest.raises(ParameterError, match="rank"):
            shuffling_plan(rank=rank, world_size=2)

    @pytest.mark.parametrize("name", ["seed", "epoch"])
    @pytest.mark.parametrize("value", [1.5, float("nan"), None, "1"])
    def test_numbers(self, name, value):
        with pytest.raises(ParameterError, match=f"`{name}` must be an integer"):
            shuffling_plan(**{name: value})

    @pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
    def test_numpy_integers_do_not_overflow(self, dtype):
        sizes = {"batch_size": 100, "fetch_factor": 50, "n_rows": 200, "seed": 3}
        as_numpy = {name: dtype(value) for name, value in sizes.items()}
        assert delivered(shuffling_plan(**as_numpy)) == delivered(shuffling_plan(**sizes))


@pytest.mark.parametrize(
    "seeded",
    [
        lambda: shuffling_plan(seed=-1),
        lambda: CellDataset(np.arange(9), BlockShuffling(1), 3, seed=-1),
    ],
)
def test_a_seed_is_not_negative(seeded):
    """As NumPy's and torch's."""
    with pytest.raises(ParameterError, match="`seed >= 0` must hold, but got seed=-1"):
        seeded()
