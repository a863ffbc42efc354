"""The next epoch is read while the last fetch of this one is delivered; nothing else changes."""

import copy
import functools
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader import matrices
from tests.loader.storages.expecting import expecting, matrix_of
from tests.loader.threads import wait_for_dropped
from tests.warm import python as warm

from cellfeed import (
    BlockShuffling,
    CellDataset,
    InterleavedDatasets,
    ParameterError,
    Streaming,
    open_collection,
)

MATRIX = matrix_of()
DENSE = MATRIX.toarray()
rows_of = functools.partial(matrices.rows_of, expected=DENSE)
N_ROWS = len(DENSE)
multi_threaded = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def dataset_over(collection, **options):
    """Two fetches an epoch, of 12 minibatches each."""
    sizes = {"batch_size": 4, "fetch_factor": 12, "seed": 0, "num_threads": 2}
    options = {"prefetch_next_epoch": True, **options}
    return CellDataset(collection, BlockShuffling(block_size=4), **(sizes | options))


@pytest.fixture
def remote():
    return expecting(MATRIX)


@pytest.fixture(scope="module")
def path(write_h5ad):
    return write_h5ad(sp.csr_matrix(MATRIX))


def planned_rows(dataset, epoch):
    plan = dataset.plan(epoch=epoch)
    rows = [plan.delivered_rows(number)[0] for number in range(plan.n_fetches)]
    return np.concatenate(rows).tolist()


def fetch_threads():
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("cellfeed-prefe")
    ]


@pytest.fixture(autouse=True)
def nothing_stays():
    """What was kept goes with its dataset."""
    yield
    wait_for_dropped()
    if fetch_threads():  # of a dataset in a circle
        gc.collect()
        wait_for_dropped()
    assert fetch_threads() == []


class TestMinibatches:
    @given(
        prefetch=st.integers(1, 5),
        fetch_factor=st.integers(1, 30),
        drop_last=st.booleans(),
        options=st.sampled_from(
            [
                {},
                {"dense": True},
                {"fetch_transform": lambda cells: cells},
                {"transform_threads": 2},
            ]
        ),
    )
    def test_of_each_epoch_are_those_of_numpy_in_the_plan_s_order(
        self, prefetch, fetch_factor, drop_last, options
    ):
        collection, store = expecting(MATRIX)
        sizes = {"batch_size": 7, "fetch_factor": fetch_factor, "drop_last": drop_last}
        dataset = dataset_over(collection, prefetch=prefetch, **sizes, **options)
        for epoch in range(3):
            assert rows_of(dataset) == planned_rows(dataset, epoch)
        dataset.set_epoch(0)
        assert store.coming == []

    @pytest.mark.parametrize("options", [{}, {"dense": True}, {"fetch_transform": lambda c: c}])
    @pytest.mark.parametrize("prefetch", [1, 3])
    def test_of_local_files(self, path, prefetch, options):
        dataset = dataset_over(open_collection(path), prefetch=prefetch, **options)
        for epoch in range(3):
            assert rows_of(dataset) == planned_rows(dataset, epoch)

    def test_of_several_at_once(self, remote):
        """Which then wait for each other's epoch, or do not."""
        dataset = dataset_over(remote[0])
        for epoch in (0, 2, 4):
            first, second = zip(*zip(dataset, dataset, strict=True), strict=True)
            assert rows_of(first) == planned_rows(dataset, epoch)
            assert rows_of(second) == planned_rows(dataset, epoch + 1)

    def test_of_interleaved_datasets(self, remote):
        def mixed(*, ahead):
            parts = [
                dataset_over(remote[0], seed=k, prefetch_next_epoch=ahead, fetch_factor=24)
                for k in range(2)
            ]
            return InterleavedDatasets(parts)

        without, ahead = mixed(ahead=False), mixed(ahead=True)
        for _ in range(3):
            assert rows_of(ahead) == rows_of(without)
        n_kept = len(fetch_threads())
        ahead.set_epoch(3)
        assert len(fetch_threads()) == n_kept > 0
        assert rows_of(ahead) == rows_of(without)
        ahead.set_epoch(7)
        assert fetch_threads() == remote[1].coming == []

    @multi_threaded
    @pytest.mark.parametrize("is_persistent", [False, True])
    def test_of_worker_processes(self, path, is_persistent):
        collection = open_collection(path)
        without, ahead = (
            dataset_over(collection, prefetch_next_epoch=each, fetch_factor=5).loader(
                2, persistent_workers=is_persistent
            )
            for each in (False, True)
        )
        for _ in range(3):
            assert rows_of(ahead) == rows_of(without)

    @multi_threaded
    @pytest.mark.parametrize("is_asked_for", [False, True])
    def test_workers_that_persist_go_on(self, path, is_asked_for):
        dataset = dataset_over(
            open_collection(path), prefetch_next_epoch=is_asked_for, batch_transform=seen_before
        )
        loader = dataset.loader(1, persistent_workers=True)
        for epoch in range(3):
            n_met, *_ = loader
            assert (n_met > 0) == (is_asked_for and epoch > 0)

    @multi_threaded
    def test_of_workers_after_epochs_without(self, path):
        dataset = dataset_over(open_collection(path))
        assert rows_of(dataset) == planned_rows(dataset, 0)
        assert fetch_threads()
        minibatches = iter(dataset.loader(1))
        first = next(minibatches)
        assert fetch_threads() == []  # before it was forked
        assert rows_of(itertools.chain([first], minibatches)) == planned_rows(dataset, 1)
        assert rows_of(dataset) == planned_rows(dataset, 2)


def seen_before(_minibatch):
    """Return how many threads that read ahead another minibatch has met, in this worker."""
    threads = [each for each in threading.enumerate() if each.name.startswith("cellfeed-prefe")]
    n = sum(hasattr(each, "was_met") for each in threads)
    for each in threads:
        vars(each)["was_met"] = True
    return n


class TestWhatIsRead:
    """The store counts: what it was told to expect, and what was read."""

    def test_the_first_fetch_of_the_next_epoch_while_the_last_is_delivered(self, remote):
        collection, store = remote
        dataset = dataset_over(collection, prefetch=1)
        epoch = iter(dataset)
        seen = list[int]()
        for _ in range(24):
            next(epoch)
            seen.append(len(store.expected))
        # One is read while another is delivered, and one more is on its way.
        assert max(seen[:12]) <= 3
        assert max(seen) <= 4
        assert list(epoch) == []
        rows_of(dataset)
        rows_of(dataset)
        dataset.set_epoch(0)
        told = [tuple(each) for each in store.expected]
        other, alone = expecting(MATRIX)
        plain = dataset_over(other, prefetch=1, prefetch_next_epoch=False)
        for _ in range(4):
            rows_of(plain)
        # Each fetch once, in the order of the plan, and up to two of an epoch that never began.
        assert told == [tuple(each) for each in alone.expected[: len(told)]]
        assert 6 <= len(told) <= 8

    def test_it_is_read_before_the_next_epoch_is_asked_for(self, remote):
        collection, store = remote
        dataset = dataset_over(collection, fetch_factor=24)  # all of an epoch
        begun = threading.Semaphore(0)
        read_ranges = store.read_ranges

        def counted(*ranges):
            begun.release()
            return read_ranges(*ranges)

        store.read_ranges = counted
        for n in itertools.count(1):
            assert len(rows_of(dataset)) == N_ROWS
            assert begun.acquire(timeout=600)
            if n == 3:
                break
        assert begun.acquire(timeout=600)  # the fourth, of which nobody has asked for a minibatch

    def test_nothing_unless_it_is_asked_for(self, remote):
        collection, store = remote
        dataset = dataset_over(collection, prefetch_next_epoch=False)
        rows_of(dataset)
        assert len(store.expected) == 2
        assert fetch_threads() == []

    def test_nothing_after_an_epoch_that_is_given_up(self, remote):
        collection, store = remote
        dataset = dataset_over(collection)
        epoch = iter(dataset)
        assert len(rows_of(itertools.islice(epoch, 24))) == N_ROWS
        epoch.close()  # before it said that it had ended
        assert store.coming == []
        assert fetch_threads() == []

    def test_no_more_than_fits_the_budget(self, remote):
        collection, store = remote
        dataset = dataset_over(collection, prefetch=4, prefetch_bytes=1)
        for _ in range(3):
            rows_of(dataset)
        assert max(n for n, _ in store.alive) == 1


def iterate(dataset):
    rows_of(dataset)
    return dataset


LETTING_GO = {
    "set_epoch": lambda dataset: dataset.set_epoch(5),
    "load_state_dict": lambda dataset: dataset.load_state_dict(dataset.state_dict()),
    "workers": lambda dataset: dataset.begin_for_workers(None, 1),
}


class TestLettingGo:
    @pytest.mark.parametrize("what", LETTING_GO)
    def test_where_another_epoch_is_next(self, remote, what):
        dataset = iterate(dataset_over(remote[0]))
        assert fetch_threads()
        LETTING_GO[what](dataset)
        assert fetch_threads() == []
        assert remote[1].coming == []

    def test_not_where_it_is_this_epoch(self, remote):
        dataset = iterate(dataset_over(remote[0]))
        dataset.set_epoch(1)
        assert fetch_threads()
        n_told = len(remote[1].expected)
        assert rows_of(dataset) == planned_rows(dataset, 1)
        dataset.set_epoch(0)
        told = [tuple(each) for each in remote[1].expected]
        assert len(set(told)) == len(told) >= n_told

    @pytest.mark.parametrize("in_a_circle", [False, True])
    def test_where_the_dataset_is_dropped(self, remote, in_a_circle):
        dataset = iterate(dataset_over(remote[0]))
        gone = weakref.ref(dataset)
        if in_a_circle:
            dataset.itself = dataset
        del dataset
        gc.collect()
        assert gone() is None
        wait_for_dropped()
        assert fetch_threads() == []
        assert remote[1].coming == []

    def test_runs_no_python(self, remote, python_calls_of_dropping):
        held = [iterate(dataset_over(remote[0]))]
        assert python_calls_of_dropping(held) == []

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("dense", True),
            ("num_threads", 1),
            ("fetch_transform", lambda cells: cells),
            ("prefetch_next_epoch", False),
            ("strategy", Streaming()),
            ("batch_size", 8),
            ("drop_last", 1),
        ],
    )
    def test_where_the_dataset_was_changed(self, remote, name, value):
        dataset = iterate(dataset_over(remote[0]))
        setattr(dataset, name, value)
        assert rows_of(dataset) == planned_rows(dataset, 1)
        dataset.set_epoch(0)
        assert remote[1].coming == []

    def test_copies_keep_nothing(self, remote):
        dataset = iterate(dataset_over(remote[0]))
        for other in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
            assert rows_of(other) == planned_rows(dataset, 1)
        assert rows_of(copy.copy(dataset)) == planned_rows(dataset, 1)

    def test_an_error_comes_where_its_epoch_is_asked_for(self, remote):
        collection, store = remote
        store.fails_at = 2  # the first fetch of the second epoch
        dataset = iterate(dataset_over(collection))
        with pytest.raises(OSError, match="reading failed"):
            rows_of(dataset)
        assert store.coming == []
        store.fails_at = None
        dataset.set_epoch(1)
        assert rows_of(dataset) == planned_rows(dataset, 1)


class TestStates:
    @given(n=st.integers(0, 60), prefetch=st.integers(1, 4))
    def test_are_those_of_a_dataset_that_reads_nothing_ahead(self, n, prefetch):
        collection, _ = expecting(MATRIX)
        states = list[str]()
        for ahead in (False, True):
            dataset = dataset_over(collection, prefetch=prefetch, prefetch_next_epoch=ahead)
            n_left = n
            while n_left >= 24:
                rows_of(dataset)
                n_left -= 24
            epoch = iter(dataset)
            for _ in range(n_left):
                next(epoch)
            states.append(json.dumps(dataset.state_dict()))
            epoch.close()
            resumed = dataset_over(collection, prefetch_next_epoch=ahead)
            resumed.load_state_dict(json.loads(states[-1]))
            rest = planned_rows(dataset, n // 24)[4 * n_left :]
            assert rows_of(resumed) == rest
            assert rows_of(resumed) == planned_rows(dataset, n // 24 + 1)
        assert states[0] == states[1]


def in_a_fork(dataset, sending):
    names = [name for name in fetch_threads() if name]
    sending.send((names, rows_of(dataset)))


@multi_threaded
def test_a_forked_process_has_nothing_of_it(remote):
    dataset = iterate(dataset_over(remote[0]))
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=in_a_fork, args=(dataset, sending), daemon=True)
    child.start()
    try:
        assert receiving.poll(120)
        assert receiving.recv() == ([], planned_rows(dataset, 1))
    finally:
        child.kill()
        child.join()
    assert rows_of(dataset) == planned_rows(dataset, 1)


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("dataset", ""),
        ("dataset", "signal.raise_signal(2)"),
        ("dataset.loader(2, persistent_workers=True)", "del dataset"),
    ],
)
def test_python_ends_with_it(path, end, what):
    code = f"""
import signal, sys
from cellfeed import BlockShuffling, CellDataset, open_collection

signal.signal(signal.SIGINT, signal.default_int_handler)
dataset = CellDataset(open_collection({str(path)!r}), BlockShuffling(4), 4, 24, seed=0,
    prefetch_next_epoch=True)
for minibatch in {what}:
    pass
print("ended", flush=True)
{end}
"""
    done = warm.run([sys.executable, "-c", code], is_finalized=True, timeout=600)
    is_interrupted = "signal" in end
    assert done.stdout == "ended\n"
    assert done.returncode == (-signal.SIGINT if is_interrupted else 0)
    assert ("KeyboardInterrupt" in done.stderr) if is_interrupted else (done.stderr == "")


@pytest.mark.parametrize("ahead", [False, True])
def test_files_of_a_dropped_dataset_are_closed_without_garbage_collection(path, ahead):
    collection = open_collection(path)

    def n_open():
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208

    iterate(dataset_over(collection, prefetch_next_epoch=ahead)).set_epoch(0)
    gc.collect()
    wait_for_dropped()
    gc.disable()  # which would close the files of earlier tests
    try:
        before = n_open()
        for _ in range(5):
            iterate(dataset_over(collection, prefetch_next_epoch=ahead))
            wait_for_dropped()
        assert n_open() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("collection", [DENSE, MATRIX])
def test_it_is_refused_where_nothing_is_read_ahead(collection):
    with pytest.raises(ParameterError, match="got prefetch_next_epoch=True with an indexable"):
        dataset_over(collection, num_threads=None)
