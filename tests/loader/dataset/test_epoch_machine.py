"""Epochs in any order of calls: iterate, break off, set, look, copy, save, and resume elsewhere.

The oracle is the plan, and NumPy for what the cells hold. Each cell comes exactly once in an epoch,
but for those that are repeated or left out to make ranks equal; what follows a state is what would
have followed without a stop.
"""

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.loader.matrices import dense
from tests.loader.read_options import parameters_of

from cellfeed import BlockShuffling, CellDataset, Collection, Streaming, open_collection
from cellfeed.sampling import EpochPlan

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

Minibatches = list[list[int]]
STRATEGIES = {
    "blocks": BlockShuffling(block_size=3),
    "whole blocks": BlockShuffling(block_size=4, drop_last=True),
    "streaming": Streaming(),
}
N_FILE = 41
X: Any = sp.random(N_FILE, 9, density=0.4, format="csr", dtype=np.float32, random_state=0)
DENSE = X.toarray()


def same(minibatch: Any) -> Any:
    return minibatch


@dataclass(frozen=True)
class Sizes:
    """What a state belongs to: data, strategy, sizes, and streams if there are any."""

    in_files: bool
    n_rows: int
    strategy: str
    batch_size: int
    fetch_factor: int
    drop_last: bool
    streams: int | None

    @property
    def of_plan(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("batch_size", "fetch_factor", "drop_last")}
        return own | {"strategy": STRATEGIES[self.strategy]}


@dataclass(frozen=True)
class Divided:
    """How the rows of an epoch are divided: into so many streams, by so many ranks and workers."""

    ranks: int
    workers: int
    streams: int


@dataclass(frozen=True)
class Place:
    """Where all ranks are in an epoch.

    Attributes
    ----------
    n_streams, expected
        The minibatches of each stream, since the epoch was last divided.
    n
        How many of these have been delivered of each.
    seen
        The rows that were delivered before it was last divided.
    n_repeated
        How many of the rows that were delivered before it was last divided may have come twice.
    is_whole
        Whether the epoch was never divided anew.
    """

    epoch: int
    n_streams: int
    expected: tuple[Minibatches, ...] = field(repr=False)
    n: int = 0
    seen: tuple[int, ...] = ()
    n_repeated: int = 0
    is_whole: bool = True

    @property
    def is_at_end(self) -> bool:
        return self.n == len(self.expected[0])

    def of_rank(self, divided: Divided, rank: int) -> Minibatches:
        """What a rank gets: the minibatches of its streams, joined."""
        n = divided.streams // divided.ranks
        own = self.expected[rank * n : (rank + 1) * n]
        return [list(chain(*each)) for each in zip(*own, strict=True)]

    @property
    def delivered(self) -> list[int]:
        return [row for own in self.expected for each in own[: self.n] for row in each]


@dataclass(eq=False)
class Going:
    """An iteration of all ranks."""

    iterators: list[Iterator[Any]]
    place: Place | None = None  # None until it has begun


class Epochs(RuleBasedStateMachine):
    """Ranks in this process, in step with each other."""

    collection: Collection
    are_persistent = False
    most_workers = 0

    @initialize(
        sizes=st.builds(
            Sizes,
            in_files=st.booleans(),
            n_rows=st.integers(30, 60) | st.integers(1, 60),
            strategy=st.sampled_from(sorted(STRATEGIES)),
            batch_size=st.integers(1, 3) | st.integers(1, 7),
            fetch_factor=st.integers(1, 5),
            drop_last=st.booleans(),
            streams=st.sampled_from([None, None, 4]),
        ),
        data=st.data(),
    )
    def begin(self, sizes, data):
        self.sizes = replace(sizes, n_rows=N_FILE) if sizes.in_files else sizes
        self.starts = dict[tuple[int, int], Place]()
        divided = self.draw_division(data)
        try:
            self.make(divided, data)
        except ValueError:  # no row is left
            self.sizes = replace(self.sizes, strategy="blocks", drop_last=False)
            self.make(divided, data)
        self.upcoming = self.start(0)
        self.latest: Place | None = None
        self.saved = list[tuple[dict[str, Any], Place]]()

    def draw_division(self, data) -> Divided:
        streams = self.sizes.streams
        ranks = data.draw(st.integers(1, 4) if streams is None else st.sampled_from([1, 2, 4]))
        workers = data.draw(st.integers(0, self.most_workers))
        return Divided(ranks, workers, streams or ranks)

    def options(self, data) -> dict[str, Any]:
        """What changes no minibatch, and may be another after a stop."""
        if not self.sizes.in_files:
            return {}
        drawn: dict[str, Any] = data.draw(
            st.fixed_dictionaries(
                {
                    "num_threads": st.integers(1, 2),
                    "prefetch": st.integers(1, 3),
                    "transform_threads": st.integers(0, 2),
                    "batch_transform": st.just(same),
                }
            ),
            label="options",
        )
        return drawn

    def datasets(self, divided: Divided, *, seed=5, **options) -> list[CellDataset]:
        cells: Any = self.collection if self.sizes.in_files else np.arange(self.sizes.n_rows)
        options |= {"seed": seed, "world_size": divided.ranks, "streams": self.sizes.streams}
        options |= self.sizes.of_plan
        return [
            CellDataset(cells, rank=rank, **parameters_of(options)) for rank in range(divided.ranks)
        ]

    def make(self, divided: Divided, data, *, seed=5) -> None:
        own = self.datasets(divided, seed=seed, **self.options(data))
        self.divided, self.going = divided, list[Going]()
        self.loaders = [self.loader(each) for each in own]

    def loader(self, dataset: CellDataset) -> Any:
        return dataset.loader()

    def rows(self, minibatch: Any) -> list[int]:
        """The rows of a minibatch, whose values are those of the file."""
        if not self.sizes.in_files:
            return [int(each) for each in minibatch]
        rows = np.asarray(minibatch.rows)
        assert np.array_equal(dense(minibatch.X), DENSE[rows])
        return [int(each) for each in rows]

    # The oracle.

    def planned(self, epoch: int) -> tuple[Minibatches, ...]:
        """The minibatches of each stream in a whole epoch."""
        found, size = [], self.sizes.batch_size
        for stream in range(self.divided.streams):
            options = {"rank": stream, "world_size": self.divided.streams} | self.sizes.of_plan
            plan = EpochPlan(n_rows=self.sizes.n_rows, seed=5, epoch=epoch, **options)
            fetches = [plan.delivered_rows(number)[0].tolist() for number in range(plan.n_fetches)]
            found.append(
                [rows[k : k + size] for rows in fetches for k in range(0, len(rows), size)]
            )
        return tuple(found)

    def start(self, epoch: int) -> Place:
        key = self.divided.streams, epoch
        if key not in self.starts:
            self.starts[key] = Place(epoch, self.divided.streams, self.planned(epoch))
            self.check_cells(self.starts[key])
        return self.starts[key]

    def resumed(self, state: dict[str, Any], place: Place) -> Place:
        """Where a state leads, on these ranks, if nothing stops them any more."""
        if place.n_streams == self.divided.streams and place.n:
            return place
        if place.is_whole and not place.n:
            return self.start(place.epoch)
        if self.sizes.streams is None:
            datasets = self.datasets(self.divided)
        else:
            datasets = self.datasets(Divided(4, 0, 4))
        for each in datasets:
            each.load_state_dict(state)
        expected = tuple([self.rows(minibatch) for minibatch in each] for each in datasets)
        anew = Place(
            place.epoch,
            self.divided.streams,
            expected,
            seen=(*place.seen, *place.delivered),
            n_repeated=place.n_repeated + (place.n_streams - 1 if place.n else 0),
            is_whole=False,
        )
        self.check_cells(anew)
        return anew

    def check_cells(self, place: Place) -> None:
        """Each cell comes once in an epoch, and streams have equally many of the same sizes."""
        lengths = [[len(each) for each in own] for own in place.expected]
        assert all(each == lengths[0] for each in lengths)
        rest = [row for own in place.expected for each in own for row in each]
        found = Counter((*place.seen, *rest))
        n_positions = STRATEGIES[self.sizes.strategy].n_positions(self.sizes.n_rows)
        assert set(found) <= set(range(self.sizes.n_rows))
        if self.sizes.drop_last:
            assert max(found.values(), default=1) == 1
            most = place.n_streams * self.sizes.batch_size
            assert n_positions - found.total() < most
        else:
            assert len(found) == n_positions
            assert found.total() - n_positions <= place.n_repeated + place.n_streams - 1

    # What is done.

    @rule(n=st.integers(1, 5))
    def take(self, n):
        """Of the newest iteration, or of a new one."""
        if not self.going:
            self.another()
        going = self.going[-1]
        is_begun = going.place is None
        place = self.upcoming if going.place is None else going.place
        n = min(n, len(place.expected[0]) - place.n)
        for rank, iterator in enumerate(going.iterators):
            expected = place.of_rank(self.divided, rank)
            for k in range(place.n, place.n + n):
                assert self.rows(next(iterator)) == expected[k]
            if not n:
                assert next(iterator, None) is None
        going.place = replace(place, n=place.n + n)
        if is_begun:
            self.upcoming = self.start(place.epoch + 1)
        if n:
            self.latest = going.place
        else:
            self.going.remove(going)

    @precondition(lambda self: len(self.going) < 2)
    @rule()
    def another(self):
        """An iteration beside the one that goes on, if there is one."""
        if self.are_persistent:  # workers of a loader have one at a time
            self.going.clear()
        self.going.append(Going([iter(each) for each in self.loaders]))

    @rule()
    def take_all(self):
        """To the end, which is asked for once more."""
        self.take(1000)
        if self.going and self.going[-1].place is not None and self.going[-1].place.is_at_end:
            self.take(1)

    @precondition(lambda self: self.going)
    @rule(oldest=st.booleans())
    def break_off(self, oldest):
        self.going.pop(0 if oldest else -1)

    @rule(epoch=st.none() | st.integers(0, 9))
    def set_epoch(self, epoch):
        """To any, or to the one that comes next, as trainers do before each epoch."""
        epoch = self.upcoming.epoch if epoch is None else epoch
        is_another = self.upcoming.epoch != epoch
        discards = is_another and (self.upcoming.n or not self.upcoming.is_whole)
        with pytest.warns(UserWarning, match="the rest") if discards else nullcontext():
            for each in self.loaders:
                each.set_epoch(epoch)
        self.latest = None
        if is_another:
            self.upcoming = self.start(epoch)

    @rule(epoch=st.integers(0, 9), n=st.integers(1, 5))
    def look(self, epoch, n):
        """Which changes nothing."""
        for rank, each in enumerate(self.loaders):
            iter(each)
            assert each.state_dict() == each.state_dict()
            assert each.dataset.plan(epoch=0).n_minibatches == len(self.start(0).expected[0])
            plan = each.dataset.plan(epoch=epoch)
            rows = [plan.delivered_rows(k)[0] for k in range(plan.n_fetches)]
            expected = self.start(epoch).of_rank(self.divided, rank)
            assert np.concatenate(rows).tolist() == list(chain(*expected))
            coming = self.upcoming.of_rank(self.divided, rank)[self.upcoming.n :]
            assert [self.rows(minibatch) for minibatch in each.peek(n)] == coming[:n]

    @rule()
    def copy(self):
        """A pickled copy counts on by itself, from the next epoch."""
        own = pickle.loads(pickle.dumps([each.dataset for each in self.loaders]))
        self.going, self.latest = [], None
        self.loaders = [self.loader(each) for each in own]

    @rule()
    def save(self):
        states = [json.loads(json.dumps(each.state_dict())) for each in self.loaders]
        assert all(each == states[0] for each in states)  # one rank saves it for all
        place = self.upcoming if self.latest is None else self.latest
        if self.latest is not None and place.is_at_end:
            place = self.start(place.epoch + 1)
        assert states[0]["epoch"] == place.epoch
        self.saved.append((states[0], place))

    @precondition(lambda self: self.saved)
    @rule(n=st.integers(0, 5), data=st.data())
    def load(self, n, data):
        """Into the datasets that are there, whatever they are doing."""
        if n:
            self.take(n)
        self.resume(*data.draw(st.sampled_from(self.saved), label="state"))

    def resume(self, state, place):
        for each in self.loaders:
            each.load_state_dict(state)
            assert each.state_dict() == state
        self.upcoming, self.latest = self.resumed(state, place), None

    @rule(n=st.integers(0, 5), seed=st.sampled_from([5, None]), data=st.data())
    def stop_and_go_on(self, n, seed, data):
        """With any number of ranks, workers and threads; the seed comes with the state."""
        if n:
            self.take(n)
        self.save()
        divided = self.draw_division(data)
        try:
            self.make(divided, data, seed=seed if divided.ranks == 1 else 5)
        except ValueError:  # no row is left for so many ranks
            return
        self.resume(*self.saved[-1])

    def teardown(self):
        for going in getattr(self, "going", []):
            for each in going.iterators:
                each.close()


class EpochsOfProcesses(Epochs):
    """The same with worker processes, which may persist."""

    most_workers = 3

    def make(self, divided, data, **options):
        self.are_persistent = divided.workers > 0 and data.draw(st.booleans(), label="persistent")
        super().make(divided, data, **options)

    def loader(self, dataset):
        options: dict[str, Any] = {}
        if self.divided.workers:
            options = {"multiprocessing_context": "fork", "persistent_workers": self.are_persistent}
        return dataset.loader(self.divided.workers, **options)


@pytest.fixture(scope="module")
def collection(write_h5ad):
    return open_collection(write_h5ad(X, compression="gzip"))


def run(machine, collection, **options):
    case = type("Case", (machine,), {"collection": collection})
    run_state_machine_as_test(case, settings=settings(settings(), **options))


@pytest.mark.slow
def test_many_steps(collection):
    run(Epochs, collection, stateful_step_count=25)


def test_a_few_steps(collection):
    run(Epochs, collection, max_examples=4, stateful_step_count=12)


@pytest.mark.slow
@pytest.mark.process
def test_with_worker_processes(collection):
    run(EpochsOfProcesses, collection, max_examples=4, stateful_step_count=20)
