"""Several datasets in turn: how many of each, in which turns, with workers and ranks."""

import copy
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import (
    BlockShuffling,
    CellDataset,
    InterleavedDatasets,
    ParameterError,
    StateError,
    Streaming,
    open_collection,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

FIRST = 10**6  # the rows of dataset k begin with k times this


def numbered(number: int, n_rows: int, batch_size: int = 4, factor: int = 3, **parameters):
    rows = np.arange(n_rows) + number * FIRST
    strategy = BlockShuffling(2)
    return CellDataset(rows, strategy, batch_size, factor, **({"seed": number} | parameters))


def delivered(minibatches) -> list[list[int]]:
    return [np.asarray(each).tolist() for each in minibatches]


def of_each(minibatches: list[list[int]], n_datasets: int) -> list[list[list[int]]]:
    """The minibatches of each dataset, in their order; none mixes datasets."""
    assert all(len({row // FIRST for row in each}) == 1 for each in minibatches)
    return [[each for each in minibatches if each[0] // FIRST == k] for k in range(n_datasets)]


class TestOneProcess:
    @given(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 7)), min_size=1, max_size=3),
        st.sampled_from(["first_exhausted", "all_exhausted", 25]),
        st.booleans(),
        st.integers(0, 3),
    )
    def test_each_dataset_delivers_its_own_epochs(self, sizes, stop, is_given, epoch):
        datasets = [numbered(k, n_rows) for k, (n_rows, _) in enumerate(sizes)]
        proportions = [share for _, share in sizes] if is_given else None
        ending = {"n_minibatches": stop} if stop == 25 else {"stop": stop}
        mixed = InterleavedDatasets(datasets, proportions, **ending)
        mixed.set_epoch(epoch)
        minibatches = delivered(mixed)
        assert len(minibatches) == len(mixed)
        turns = mixed.turns(epoch=epoch)
        assert turns.tolist() == [each[0] // FIRST for each in minibatches]
        for number, part in enumerate(of_each(minibatches, len(datasets))):
            assert len(part) == mixed.minibatches_of_each[number]
            n_epochs = -(-len(part) // len(datasets[number]))
            alone = numbered(number, sizes[number][0])
            expected = list[list[int]]()
            for later in range(n_epochs):
                alone.set_epoch(epoch + later * 2**40)
                expected += delivered(alone)
            assert part == expected[: len(part)]

    @pytest.mark.parametrize(
        ("proportions", "parameters", "counts"),
        [
            ([0.1, 0.3], {}, (10, 30)),
            ([0.1, 0.3], {"stop": "all_exhausted"}, (25, 75)),
            ([0.1, 0.3], {"n_minibatches": 8}, (2, 6)),
            ([0.1, 0.3], {"n_minibatches": 10}, (3, 7)),
            ([0.1, 0.3], {"n_minibatches": 1000}, (250, 750)),
            ([1, 1e-12], {}, (10, 0)),
            (None, {}, (10, 75)),  # every cell comes once
        ],
    )
    def test_how_many_each_delivers(self, proportions, parameters, counts):
        mixed = InterleavedDatasets([numbered(0, 40), numbered(1, 300)], proportions, **parameters)
        assert mixed.minibatches_of_each == counts
        assert len(list(mixed)) == len(mixed) == sum(counts)

    def test_turns_are_random_and_the_same_for_the_same_epoch(self):
        def make():
            return InterleavedDatasets([numbered(0, 400), numbered(1, 400)], [1, 1])

        mixed = make()
        epochs = [mixed.turns(epoch=epoch).tolist() for epoch in range(3)]
        assert len(set(map(tuple, epochs))) == 3
        assert 60 < np.count_nonzero(np.diff(epochs[0])) < 140
        assert [delivered(mixed) for _ in range(2)] == [delivered(again) for again in [make()] * 2]
        again = make()
        again.set_epoch(1)
        assert delivered(again) != delivered(make())

    def test_that_is_dropped_ends_what_its_parts_read(self, plates):
        collection = open_collection(plates)
        parts = [CellDataset(collection, Streaming(), 2, 2, seed=k) for k in range(2)]
        mixed = InterleavedDatasets(parts)
        for _ in range(3):
            iterator = iter(mixed)
            next(iterator)
            iterator.close()
        assert len(list(mixed)) == len(mixed)


class TestWorkers:
    @pytest.mark.process
    @pytest.mark.parametrize("num_workers", [1, 2])
    @pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
    def test_deliver_the_same_minibatches(self, num_workers, stop):
        def make():
            datasets = [numbered(0, 90), numbered(1, 40), numbered(2, 10)]
            return InterleavedDatasets(datasets, [5, 2, 1], stop=stop)

        mixed, alone = make(), make()
        for _ in range(2):
            minibatches = delivered(mixed.loader(num_workers=num_workers))
            assert len(minibatches) == len(mixed)
            assert minibatches == delivered(alone)


class TestStopped:
    @staticmethod
    def mixed(**parameters):
        datasets = [numbered(0, 24, factor=2), numbered(1, 42, seed=None)]
        return InterleavedDatasets(datasets, [2, 1], stop="all_exhausted", **parameters)

    @given(st.data())
    def test_goes_on_at_any_minibatch(self, data):
        first = self.mixed()
        whole = [each for _ in range(2) for each in delivered(first)]
        first.set_epoch(0)
        n, position = len(first), data.draw(st.integers(1, len(first)))
        assert delivered(itertools.islice(first, position)) == whole[:position]
        state = json.loads(json.dumps(first.state_dict()))
        second = self.mixed()
        second.load_state_dict(state)
        assert second.state_dict() == state
        rest = n - position or n
        assert delivered(second) == whole[position : position + rest]

    @pytest.mark.process
    def test_with_worker_processes(self):
        loader = self.mixed().loader(num_workers=2)
        iterator = iter(loader)
        first = delivered(itertools.islice(iterator, 7))
        state = loader.state_dict()
        rest = delivered(iterator)
        assert len(first + rest) == len(loader)
        again = self.mixed().loader(num_workers=2)
        again.load_state_dict(state)
        assert delivered(again) == rest

    @pytest.mark.filterwarnings("ignore:ranks are not compared:UserWarning")
    def test_other_ranks_after_an_epoch_repeat_none_of_a_dataset(self):
        """On one rank, a dataset comes half as often in an epoch as on two."""

        def mixed(rank, world_size):
            ranks = {"rank": rank, "world_size": world_size}
            datasets = [numbered(k, n, factor=5, **ranks) for k, n in enumerate((80, 800))]
            return InterleavedDatasets(datasets, [1, 1], n_minibatches=80)

        def of_first(all_of_rank):
            return [tuple(each) for part in all_of_rank for each in of_each(delivered(part), 2)[0]]

        two = [mixed(rank, 2) for rank in range(2)]
        before = of_first([*two, *two])
        one = mixed(0, 1)
        one.load_state_dict(two[0].state_dict())
        later = of_first([one] * 4)
        assert len(set(before)) == len(before)
        assert len({*before, *later}) == len(before) + len(later)

    @pytest.mark.process
    def test_with_any_number_of_workers(self):
        first, others = self.mixed(), self.mixed().loader(num_workers=2)
        whole = delivered(first)
        first.set_epoch(0)
        assert delivered(itertools.islice(first, 3)) == whole[:3]
        others.load_state_dict(first.state_dict())
        assert delivered(others) == whole[3:]

    def test_other_ranks_or_datasets_are_refused(self):
        first = self.mixed()
        next(iter(first))
        parts = [
            numbered(0, 24, factor=2, rank=0, world_size=2),
            numbered(1, 42, seed=0, rank=0, world_size=2),
        ]
        state = InterleavedDatasets(parts, [2, 1], stop="all_exhausted")
        iterator = iter(state)
        next(iterator)
        told = "the state is of 2 ranks, but there are 1 ranks now"
        alone = InterleavedDatasets(
            [numbered(0, 24, factor=2), numbered(1, 42, seed=0)], [2, 1], stop="all_exhausted"
        )
        alone.load_state_dict(state.state_dict())
        with pytest.raises(StateError, match=told):
            next(iter(alone))
        with pytest.raises(StateError, match="n_minibatches=None there, n_minibatches=5 here"):
            self.mixed(n_minibatches=5).load_state_dict(first.state_dict())

    def test_a_seed_that_is_refused_leaves_all_as_they_were(self):
        def mixed(last_seed):
            seeds = (None, None, last_seed)
            datasets = [numbered(k, 40, seed=seed) for k, seed in enumerate(seeds)]
            return InterleavedDatasets(datasets)

        first, other = mixed(2), mixed(3)
        next(iter(first))
        before = other.state_dict()
        with pytest.raises(StateError, match="seed=2, but seed=3 was given"):
            other.load_state_dict(first.state_dict())
        assert other.state_dict() == before


class TestRanks:
    def test_take_the_same_turns_and_no_cell_twice(self):
        of_ranks = []
        for rank in range(3):
            ranks = {"rank": rank, "world_size": 3, "drop_last": True}
            mixed = InterleavedDatasets([numbered(0, 200, **ranks), numbered(1, 90, **ranks)])
            of_ranks.append((mixed.turns(epoch=0).tolist(), delivered(mixed)))
        assert all(turns == of_ranks[0][0] for turns, _ in of_ranks)
        rows = [row for _, minibatches in of_ranks for each in minibatches for row in each]
        assert len(rows) == len(set(rows))

    def test_have_to_be_the_same(self):
        datasets = [numbered(0, 50, rank=k, world_size=2) for k in range(2)]
        with pytest.raises(ParameterError, match=r"same rank, .*\[\(0, 2, None\), \(1, 2"):
            InterleavedDatasets(datasets)


def test_a_copy_counts_what_its_parts_deliver():
    mixed = InterleavedDatasets([numbered(0, 40), numbered(1, 40)])
    copied = copy.copy(mixed)
    n = sum(len(each) for each in copied)
    assert copied.statistics().n_cells == n


class TestBadParameters:
    @pytest.mark.parametrize("datasets", [[], [np.arange(3)]])
    def test_datasets(self, datasets):
        with pytest.raises(ParameterError, match="must be CellDatasets, at least one"):
            InterleavedDatasets(datasets)

    @pytest.mark.parametrize(
        "proportions", [[1], [1, 2, 3], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")]]
    )
    def test_proportions(self, proportions):
        with pytest.raises(ParameterError, match=r"`proportions` must be positive .* each of 2 "):
            InterleavedDatasets([numbered(0, 9), numbered(1, 9)], proportions)

    def test_stop(self):
        with pytest.raises(ParameterError, match="`stop` must be one of"):
            InterleavedDatasets([numbered(0, 9)], stop="never")  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="`n_minibatches >= 1`"):
            InterleavedDatasets([numbered(0, 9)], n_minibatches=0)
