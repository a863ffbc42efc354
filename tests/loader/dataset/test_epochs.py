"""Epochs that are begun in odd ways; test_epoch_machine.py has the usual ones, in any order."""

import copy
import itertools
import multiprocessing
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cellfeed import BlockShuffling, CellDataset, ParameterError, Streaming, open_collection

N_ROWS = 100

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on one core
]


@pytest.fixture
def dataset() -> CellDataset:
    return CellDataset(np.arange(N_ROWS), BlockShuffling(4), 8, 2, seed=0)


def batches(loader: Iterable[Any]) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in loader]


def minibatches_of_epoch(dataset: CellDataset, epoch: int) -> Counter[tuple[int, ...]]:
    """What an epoch delivers, in any order of its minibatches."""
    plan, found = dataset.plan(epoch=epoch), Counter[tuple[int, ...]]()
    for number in range(plan.n_fetches):
        rows = plan.delivered_rows(number)[0].tolist()
        found.update(tuple(rows[i : i + 8]) for i in range(0, len(rows), 8))
    return found


def is_epoch(dataset: CellDataset, found: list[list[int]], epoch: int) -> bool:
    return Counter(map(tuple, found)) == minibatches_of_epoch(dataset, epoch)


def assert_is_epoch(dataset: CellDataset, found: list[list[int]], epoch: int) -> None:
    assert sorted(row for batch in found for row in batch) == list(range(N_ROWS))
    assert is_epoch(dataset, found, epoch)


@pytest.mark.parametrize("epoch", [2**70, -1, 2**62])
def test_an_epoch_that_nobody_reaches_is_refused(dataset, epoch):
    with pytest.raises(ParameterError, match=f"`0 <= epoch < {2**62}` must hold, but got "):
        dataset.set_epoch(epoch)


def fork(_: Any = None) -> None:
    """Start a process without multiprocessing, as `subprocess` does with a ``preexec_fn``."""
    number = os.fork()
    if not number:
        os._exit(0)
    os.waitpid(number, 0)


def negative(minibatch: Any) -> Any:
    return -minibatch


class InThread(IterableDataset[Any]):
    """Iterates over a dataset in a thread, as those do that read ahead in a worker."""

    def __init__(self, dataset: CellDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(self.dataset))
        thread.start()
        thread.join()
        return iter(found)


@pytest.mark.process
@pytest.mark.parametrize("persistent", [False, True])
class TestWorkersThatDoMore:
    """All workers of an iteration are in one epoch, whatever else they do."""

    def assert_are_epochs(self, dataset: CellDataset, loader: Iterable[Any]) -> None:
        for epoch in range(3):
            assert_is_epoch(dataset, batches(loader), epoch)

    def test_have_what_was_set_between_epochs(self, dataset, persistent):
        loader = dataset.loader(2, persistent_workers=persistent)
        batches(loader)
        dataset.batch_transform = negative
        assert sorted(np.concatenate(batches(loader)).tolist()) == list(range(1 - N_ROWS, 1))
        dataset.batch_transform, dataset.strategy = None, BlockShuffling(4, indices=range(50))
        assert sorted(np.concatenate(batches(loader)).tolist()) == list(range(50))

    def test_start_other_processes_first(self, dataset, persistent):
        options: dict[str, Any] = {"persistent_workers": persistent, "worker_init_fn": fork}
        self.assert_are_epochs(dataset, dataset.loader(2, **options))
        plain = CellDataset(np.arange(N_ROWS), BlockShuffling(4), 8, 2, seed=0)
        other = DataLoader(plain, batch_size=None, num_workers=2, **options)
        self.assert_are_epochs(plain, other)

    def test_start_other_processes_meanwhile(self, dataset, persistent):
        def with_fork(minibatch: Any) -> Any:
            worker = get_worker_info()
            if worker is not None and worker.id:
                fork()
            return minibatch

        dataset.batch_transform = with_fork
        self.assert_are_epochs(dataset, dataset.loader(2, persistent_workers=persistent))

    def test_iterate_in_a_thread(self, dataset, persistent):
        loader = DataLoader(
            InThread(dataset), batch_size=None, num_workers=2, persistent_workers=persistent
        )
        self.assert_are_epochs(dataset, loader)


@pytest.mark.process
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_and_this_process_share_one_count(dataset, method, persistent):
    """Also where a user seeds torch before each epoch."""
    loader = dataset.loader(2, multiprocessing_context=method, persistent_workers=persistent)
    for epoch in (0, 1, 5):
        if epoch == 5:
            dataset.set_epoch(epoch)
        torch.manual_seed(0)
        assert_is_epoch(dataset, batches(loader), epoch)
    assert_is_epoch(dataset, batches(dataset), 6)


class Late:
    """Workers that begin when they are told to, or never."""

    def __init__(self, folder: Path, *workers: int) -> None:
        self.folder, self.workers = folder, workers

    def __call__(self, worker: int) -> None:
        while worker in self.workers and not (self.folder / "go").exists():
            time.sleep(0.01)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["own", "plain"])
class TestWorkersThatComeLate:
    @pytest.fixture
    def make_loader(self, dataset, kind, tmp_path):
        def make(*late: int) -> DataLoader[Any]:
            options: dict[str, Any] = {
                "num_workers": 2,
                "prefetch_factor": 2,
                "multiprocessing_context": "fork",
                "worker_init_fn": Late(tmp_path, *late),
                "generator": torch.Generator().manual_seed(0),
            }
            if kind == "own":
                return dataset.loader(**options)  # type: ignore[no-any-return]
            return DataLoader(dataset, batch_size=None, **options)

        return make

    @pytest.mark.parametrize("late", [(0, 1), (1,)], ids=["none begins", "one begins"])
    def test_or_never_leave_the_next_epochs_whole(self, dataset, make_loader, kind, late):
        """Though every iteration has the same base seed."""
        others = multiprocessing.active_children()
        begun = iter(make_loader(*late))
        if late == (1,):
            next(begun)  # by the first worker
        elif kind == "own":
            pytest.skip("workers start with the first minibatch")
        workers = [each for each in multiprocessing.active_children() if each not in others]
        assert len(workers) == 2
        for process in workers:
            process.kill()
            process.join()
        del begun
        # Of other DataLoaders' iterations, those count that a worker began.
        first = 0 if late == (0, 1) else 1
        for epoch in range(first, first + 3):
            assert_is_epoch(dataset, batches(make_loader()), epoch)

    def test_while_another_loader_runs_leave_both_epochs_whole(
        self, dataset, make_loader, kind, tmp_path
    ):
        """Two loaders at once, of one base seed; the workers of the second come first."""
        first = iter(make_loader(1))
        earlier = [next(first).tolist()]
        later = batches(make_loader())
        (tmp_path / "go").touch()
        earlier += batches(first)
        assert_is_epoch(dataset, earlier, 0)
        assert_is_epoch(dataset, later, 1)
        assert_is_epoch(dataset, batches(make_loader()), 2)

    def test_workers_that_two_threads_start_in_turns(self, dataset, make_loader):
        """Of one base seed: a worker of one loader, one of the other, and so on."""
        is_started = [threading.Event() for _ in range(4)]

        class InTurns(type(multiprocessing.get_context("fork"))):  # type: ignore[misc]
            def __init__(self, place: int) -> None:
                super().__init__()
                self.place = place

            def Process(self, *arguments: Any, **options: Any) -> Any:  # noqa: N802
                if self.place > 1:
                    is_started[self.place - 2].set()
                if self.place > 0:
                    is_started[self.place - 1].wait(timeout=600)
                self.place += 2
                return super().Process(*arguments, **options)

        begun = []

        def start(place: int) -> None:
            loader = make_loader()
            loader.multiprocessing_context = InTurns(place)
            iterator = iter(loader)
            begun.append(itertools.chain([next(iterator)], iterator))
            is_started[place + 2].set()

        threads = [threading.Thread(target=start, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = list(map(batches, begun))
        epochs = {epoch for each in found for epoch in range(3) if is_epoch(dataset, each, epoch)}
        assert epochs == {0, 1}


def test_copies_count_their_own_epochs(dataset):
    """As one for validation, with another strategy."""
    assert_is_epoch(dataset, batches(dataset), 0)
    pickled = pickle.loads(pickle.dumps(dataset))
    iterator = iter(dataset)
    for _ in range(5):
        next(iterator)
    state = dataset.state_dict()
    copied = copy.copy(dataset)
    copied.strategy = Streaming()
    assert batches(copied) == [list(range(k, min(k + 8, N_ROWS))) for k in range(0, N_ROWS, 8)]
    assert dataset.state_dict() == state
    assert sum(map(len, batches(iterator))) == N_ROWS - 5 * 8
    assert_is_epoch(pickled, batches(pickled), 1)
    assert_is_epoch(dataset, batches(dataset), 2)


def test_a_loaded_state_that_another_epoch_discards(dataset):
    iterator = iter(dataset)
    for _ in range(5):
        next(iterator)
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    dataset.set_epoch(0)  # which it resumes
    assert len(batches(dataset)) == 8
    dataset.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"^epoch 3 was set, .* of epoch 0, after 5 minibatches, "):
        dataset.set_epoch(3)
    assert_is_epoch(dataset, batches(dataset), 3)


class Waiting:
    """Rows that come once two threads want some."""

    shape, dtype = (N_ROWS,), np.dtype(np.int64)

    def __init__(self) -> None:
        self.threads, self.are_wanted = set[int](), threading.Event()

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, rows: Any) -> Any:
        self.threads.add(threading.get_ident())
        if len(self.threads) > 1:
            self.are_wanted.set()
        assert self.are_wanted.wait(600)
        return np.asarray(rows)


def test_only_one_of_two_threads_resumes():
    """Though the first has no minibatch yet when the second begins."""
    first, resumed = (CellDataset(Waiting(), BlockShuffling(4), 8, 2, seed=0) for _ in range(2))
    first.collection.are_wanted.set()
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    resumed.load_state_dict(first.state_dict())
    found: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: found.append(batches(resumed))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, found)) == [8, 13]


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_process_that_is_no_worker_begins_where_it_was_started(dataset, method):
    """Also if it iterates after the process that started it has begun the next epoch."""
    context = multiprocessing.get_context(method)
    may_begin, found = context.Event(), context.SimpleQueue()
    child = context.Process(target=iterate_later, args=(dataset, may_begin, found))
    child.start()
    assert_is_epoch(dataset, batches(dataset), 0)
    may_begin.set()
    assert_is_epoch(dataset, found.get(), 0)
    child.join()
    assert_is_epoch(dataset, batches(dataset), 1)


def iterate_later(dataset: CellDataset, may_begin: Any, found: Any) -> None:
    may_begin.wait()
    found.put(batches(dataset))


@pytest.mark.process
def test_loaders_with_different_numbers_of_workers_count_together(dataset):
    for epoch, num_workers in enumerate([0, 2, 1, 2]):
        loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
        assert_is_epoch(dataset, batches(loader), epoch)


@pytest.mark.process
def test_iterations_that_alternate_keep_their_epochs(dataset):
    first, second = iter(dataset.loader(2)), iter(dataset.loader(2))
    found: list[list[list[int]]] = [[], []]
    for pair in zip(first, second, strict=True):
        for side, batch in enumerate(pair):
            found[side].append(np.asarray(batch).tolist())
    epochs = {epoch for side in found for epoch in range(2) if is_epoch(dataset, side, epoch)}
    assert epochs == {0, 1}


def test_how_far_a_loader_runs_ahead(write_h5ad):
    """By a fetch, within bounds; over files, few minibatches wait, unless functions make them."""
    for fetch_factor, ahead in ((1, 2), (20, 21), (10_000, 256)):
        dataset = CellDataset(np.arange(N_ROWS), BlockShuffling(4), 8, fetch_factor, seed=0)
        assert dataset.loader(2).prefetch_factor == ahead
    assert dataset.loader(2, prefetch_factor=3).prefetch_factor == 3
    collection = open_collection(write_h5ad(np.eye(80, dtype=np.float32)))
    for transform, ahead in ((None, 8), (lambda fetched: fetched, 21)):
        dataset = CellDataset(
            collection, BlockShuffling(4), 2, 20, seed=0, fetch_transform=transform
        )
        assert dataset.loader(2).prefetch_factor == ahead


@pytest.mark.process
def test_more_workers_than_fetches():
    dataset = CellDataset(np.arange(10), BlockShuffling(4), 8, 2, seed=0)
    found = batches(dataset.loader(2))
    assert sorted(row for batch in found for row in batch) == list(range(10))
    assert len(found) == len(dataset) == 2
