"""Epochs that are begun in odd ways; test_epoch_machine.py has the usual ones, in any order."""

import copy
import multiprocessing
import pickle
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cellfeed import BlockShuffling, CellDataset, ParameterError

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


def in_order(dataset: CellDataset, epoch: int) -> list[list[int]]:
    """What an epoch delivers, by its plan."""
    plan = dataset.plan(epoch=epoch)
    fetches = [plan.delivered_rows(number)[0].tolist() for number in range(plan.n_fetches)]
    return [rows[i : i + 8] for rows in fetches for i in range(0, len(rows), 8)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("num_workers", "method", "persistent"),
    [
        *(
            (num_workers, "fork", persistent)
            for num_workers in (1, 2, 7)
            for persistent in (False, True)
        ),
        *((1, "forkserver", True), (2, "forkserver", False), (7, "forkserver", True)),
        (2, "spawn", False),  # each of which imports for itself
    ],
)
def test_the_order_is_that_of_the_plan(dataset, num_workers, method, persistent):
    loader = dataset.loader(
        num_workers, multiprocessing_context=method, persistent_workers=persistent
    )
    for epoch in range(1 if method == "spawn" else 2):
        assert batches(loader) == in_order(dataset, epoch)


class TestWorkersOfAnotherLoader:
    """They are told nothing: the epoch is what was set, else torch's seed says it."""

    def loader(self, dataset: CellDataset, **options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=None, num_workers=2, **options)

    @pytest.mark.process
    def test_deliver_the_epoch_that_was_set(self, dataset):
        for epoch in (0, 3):
            dataset.set_epoch(epoch)
            for _ in range(2):  # which their process does not know of
                assert_is_epoch(dataset, batches(self.loader(dataset)), epoch)

    @pytest.mark.process
    def test_that_persist_go_on_with_the_next(self, dataset):
        dataset.set_epoch(4)
        loader = self.loader(dataset, persistent_workers=True)
        for epoch in range(4, 7):
            assert_is_epoch(dataset, batches(loader), epoch)

    @pytest.mark.process
    def test_follow_the_seed_of_torch_otherwise(self, dataset):
        torch.manual_seed(0)
        epochs = [batches(self.loader(dataset)) for _ in range(3)]
        torch.manual_seed(0)
        again = [batches(self.loader(dataset)) for _ in range(3)]
        assert again == epochs
        assert epochs[0] != epochs[1] != epochs[2]
        for each in epochs:
            assert sorted(row for batch in each for row in batch) == list(range(N_ROWS))


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


def test_copies_count_their_own_epochs(dataset):
    assert_is_epoch(dataset, batches(dataset), 0)
    pickled = pickle.loads(pickle.dumps(dataset))
    iterator = iter(dataset)
    for _ in range(5):
        next(iterator)
    state = dataset.state_dict()
    copied = copy.copy(dataset)
    assert_is_epoch(copied, batches(copied), 2)
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
        assert batches(dataset.loader(num_workers)) == in_order(dataset, epoch)


@pytest.mark.process
def test_iterations_that_alternate_keep_their_epochs(dataset):
    first, second = iter(dataset.loader(2)), iter(dataset.loader(2))
    found: list[list[list[int]]] = [[], []]
    for pair in zip(first, second, strict=True):
        for side, batch in enumerate(pair):
            found[side].append(np.asarray(batch).tolist())
    epochs = {epoch for side in found for epoch in range(2) if is_epoch(dataset, side, epoch)}
    assert epochs == {0, 1}


@pytest.mark.process
@pytest.mark.parametrize("n_bytes", [1, 100, 10**9])
def test_messages_of_any_size(dataset, monkeypatch, n_bytes):
    monkeypatch.setattr("cellfeed.dataset._loader._MESSAGE_BYTES", n_bytes)
    assert batches(dataset.loader(2)) == in_order(dataset, 0)


def test_peeking_counts_as_nothing(dataset):
    for epoch in range(2):
        for n in (1, 3, 1000):
            assert batches(dataset.peek(n)) == batches(dataset.loader().peek(n))
            assert batches(dataset.peek(n)) == in_order(dataset, epoch)[:n]
        assert batches(dataset) == in_order(dataset, epoch)
    with pytest.raises(ParameterError, match="`n >= 1`"):
        dataset.peek(0)


def test_the_state_is_that_of_the_latest_minibatch(dataset):
    """Of two iterations, one inside the other."""
    outer = iter(dataset)
    for _ in range(3):
        next(outer)
    inner = iter(dataset)
    next(inner)
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["progress"]) == (1, [1, 1])
    next(outer)
    state = dataset.state_dict()
    assert (state["epoch"], state["progress"]) == (0, [1, 4])
    resumed = CellDataset(np.arange(N_ROWS), BlockShuffling(4), 8, 2, seed=0)
    resumed.load_state_dict(state)
    assert batches(resumed) == in_order(dataset, 0)[4:]


@pytest.mark.process
def test_more_workers_than_fetches():
    dataset = CellDataset(np.arange(10), BlockShuffling(4), 8, 2, seed=0)
    found = batches(dataset.loader(2))
    assert sorted(row for batch in found for row in batch) == list(range(10))
    assert len(found) == len(dataset) == 2


class TestAnIterationThatFailsToBegin:
    """It has not begun, and changes nothing."""

    def test_leaves_another_that_is_under_way(self, dataset, monkeypatch):
        iterator = iter(dataset)
        for _ in range(5):
            next(iterator)
        state = dataset.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(CellDataset, "_n_left", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                next(iter(dataset))
        assert dataset.state_dict() == state
        assert batches(dataset) == in_order(dataset, 1)

    @pytest.mark.process
    @pytest.mark.filterwarnings("ignore:Got pickle error")  # of torch
    def test_for_want_of_workers(self, dataset):
        loader = dataset.loader(1, multiprocessing_context="spawn", worker_init_fn=lambda _: None)
        for _ in range(2):
            with pytest.raises((AttributeError, pickle.PicklingError)):
                next(iter(loader))
        assert batches(dataset) == in_order(dataset, 0)


@pytest.mark.process
def test_what_torch_draws_does_not_depend_on_the_number_of_workers(dataset):
    drawn = list[list[float]]()
    for num_workers, persist in ((0, False), (1, False), (2, False), (2, True)):
        torch.manual_seed(0)
        loader = dataset.loader(num_workers, persistent_workers=persist)
        drawn.append([])
        for _ in range(3):
            batches(loader)
            drawn[-1] += torch.rand(2).tolist()
    assert drawn == [drawn[0]] * 4


@pytest.mark.process
def test_options_that_are_none_are_those_of_a_dataloader(dataset):
    options: dict[str, Any] = {"collate_fn": None, "worker_init_fn": None, "generator": None}
    assert batches(dataset.loader(2, multiprocessing_context=None, **options)) == in_order(
        dataset, 0
    )
