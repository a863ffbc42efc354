"""Memory that a worker lends: handed over, given back, and kept only as long as it is used."""

import gc
import multiprocessing
import os
import pickle
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    DeliveryError,
    Minibatch,
    ParameterError,
    Streaming,
    open_collection,
)
from cellfeed.bytes._buffers import SharedFile, SharedPool
from cellfeed.dataset._workers import Arrivals, Event, WorkerStart, message_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

N_VALUES = 20_000  # more than are pickled
PAGE = 4096


class Both:
    """A worker that lends memory, and the process that it is lent to, in one process."""

    def __init__(self):
        self.arrivals = Arrivals(1)
        (file,) = self.arrivals.files
        self.pool = SharedPool(file)
        leave = Event(multiprocessing.get_context())
        self.start = WorkerStart(
            leave=leave, file=file, key=self.arrivals.key, are_rows_placed=True, pool=self.pool
        )
        self._watched = os.dup(file.descriptor)

    def placed(self, value, n=N_VALUES):
        """Return values in memory that is lent, as a reader places them there."""
        array = self.pool.acquire(4 * n).array(np.dtype(np.float32), n)
        array[:] = value
        return array

    def message(self, what):
        return message_of(what, self.start, self.pool)

    def send(self, what):
        return pickle.loads(pickle.dumps(self.message(what)))

    def end_workers(self):
        del self.arrivals, self.start, self.pool
        gc.collect()

    @property
    def resident_bytes(self):
        return os.fstat(self._watched).st_blocks * 512

    def close(self):
        os.close(self._watched)


@pytest.fixture
def both():
    both = Both()
    yield both
    both.close()


def test_what_was_placed_there_is_not_copied_but_what_was_elsewhere_once(both):
    placed, own = both.placed(1), torch.ones(N_VALUES)
    for sent, is_shared in ((torch.from_numpy(placed), True), (own, False)):
        received = both.send({"X": sent})["X"]
        received[:] = 2
        assert sent.tolist() == [2 if is_shared else 1] * N_VALUES
    assert both.arrivals.n_segments == 1


def test_it_is_lent_to_one_at_a_time(both):
    """A function may return the same twice."""
    placed = torch.from_numpy(both.placed(1))
    one, other = both.send(placed), both.send(placed)
    one[:] = 2
    assert other.tolist() == [1] * N_VALUES


def test_it_is_used_again_when_both_have_let_it_go(both):
    addresses = set()
    for k in range(50):
        placed = both.placed(k)
        addresses.add(placed.ctypes.data)
        received = both.send(torch.from_numpy(placed))
        del placed
        assert received.tolist() == [k] * N_VALUES
        del received
    assert len(addresses) == 2  # that of the last is given back with the next
    assert both.arrivals.n_segments == 1


def test_it_is_not_used_again_while_it_is_used(both):
    placed = both.placed(1)
    both.send(placed)
    both.send(None)
    assert both.placed(2).ctypes.data != placed.ctypes.data
    received = both.send(both.placed(3))[10:20]  # a part of it
    for k in range(5):
        both.send(both.placed(k))
    assert received.tolist() == [3] * 10
    assert placed.tolist() == [1] * N_VALUES


def test_who_keeps_all_keeps_what_they_take(both):
    kept = [both.send(both.placed(k)) for k in range(40)]
    assert [set(each.tolist()) for each in kept] == [{k} for k in range(40)]
    most = 40 * (4 * N_VALUES + PAGE) + PAGE * both.arrivals.n_segments
    assert both.resident_bytes <= most
    del kept
    both.send(None)
    for k in range(40):
        both.placed(k)
    assert both.resident_bytes <= most + 4 * N_VALUES + PAGE


def test_memory_of_another_size_takes_the_place_of_what_is_free(both):
    for n in (N_VALUES, 3 * N_VALUES, 9 * N_VALUES, 27 * N_VALUES):
        both.send(both.placed(1, n))
        both.send(None)
    assert both.resident_bytes <= 4 * 27 * N_VALUES * 1.2


def test_what_is_kept_when_the_workers_have_gone(both):
    """Keeps no more than itself, and is given back when all of it is dropped."""
    kept = [both.send(both.placed(k)) for k in range(30)]
    del kept[3:]
    whole = both.resident_bytes
    both.end_workers()
    assert [set(each.tolist()) for each in kept] == [{k} for k in range(3)]
    assert both.resident_bytes < whole / 5
    del kept[:-1]
    assert kept[0].tolist() == [2] * N_VALUES
    n_mapped = lent_to_this_process()
    del kept[:]
    assert lent_to_this_process() == n_mapped - 1


def lent_to_this_process():
    return Path("/proc/self/maps").read_text().count("memfd:cellfeed")


def test_what_was_dropped_before_the_workers_have_gone(both):
    kept = [both.send(both.placed(k)) for k in range(30)][7]
    never_sent = [both.placed(k, 3 * N_VALUES) for k in range(5)]
    whole = both.resident_bytes
    assert whole > 4 * N_VALUES * (30 + 3 * len(never_sent))
    del never_sent
    both.end_workers()
    assert kept.tolist() == [7] * N_VALUES
    assert both.resident_bytes < whole / 10


_LARGE = torch.arange(2 * N_VALUES)
SENT = {
    "large": np.arange(2 * N_VALUES).reshape(2, -1),
    "in Fortran's order": np.arange(2 * N_VALUES).reshape(2, -1).T,
    "small": np.arange(6),
    "empty": np.empty((0, 5), np.int16),
    "objects": np.array(["a", None], object),
    "fields": np.zeros(N_VALUES, [("token", np.int32), ("value", np.float16)]),
    "aligned": np.zeros(N_VALUES, np.dtype([("a", np.int8), ("b", np.float64)], align=True)),
    "over": np.ones(N_VALUES, {"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]}),
    "tensor": _LARGE.reshape(2, -1),
    "transposed": _LARGE.reshape(2, -1).T,
    "part": _LARGE[::2],
    "bfloat16": torch.ones(N_VALUES, dtype=torch.bfloat16),
    "bool": torch.ones(N_VALUES, dtype=torch.bool),
    "scalar": torch.tensor(3.5),
    "empty tensor": torch.empty((0, 5), dtype=torch.int16),
    "conjugate": torch.arange(N_VALUES).to(torch.complex64).conj(),
}


@pytest.mark.parametrize("what", SENT.values(), ids=SENT)
def test_arrays_and_tensors_are_what_they_were(both, what):
    received = both.send([what, what])
    for each in received:
        assert type(each) is type(what)
        assert each.dtype == what.dtype
        assert each.shape == what.shape
        if isinstance(what, np.ndarray):
            assert np.array_equal(each, what)
            assert each.flags.writeable
        else:
            assert torch.equal(each, what)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_minibatches_and_nested_tensors_are_what_they_were(both):
    nested = torch.nested.nested_tensor([torch.ones(N_VALUES), torch.zeros(3)])
    assert [each.tolist() for each in both.send(nested)] == [[1.0] * N_VALUES, [0.0] * 3]
    some = sp.random(40, 3000, density=0.3, dtype=np.float32, random_state=0)
    matrix = sp.csr_array(some)
    cells = Cells({"X": matrix}, {"label": np.arange(40)}, np.arange(40))
    sparse, dense = both.send([cells.to_torch(), cells.to_torch(dense=True)])
    assert isinstance(sparse, Minibatch)
    assert sparse.X.layout == torch.sparse_csr
    assert np.array_equal(sparse.X.to_dense().numpy(), matrix.toarray())
    assert np.array_equal(dense.X.numpy(), matrix.toarray())
    assert sparse.obs["label"].tolist() == dense.rows.tolist() == list(range(40))
    assert np.array_equal(both.send(cells).X.toarray(), matrix.toarray())


@contextmanager
def few_open_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_many_open_files_are_told_by_either_side(both):
    message, other = both.message(both.placed(1)), Both()
    with few_open_files():
        with pytest.raises(DeliveryError, match=r"cannot be received .*\(ulimit -n\)"):
            pickle.loads(pickle.dumps(message))
        with pytest.raises(ParameterError, match=r"allow more open files.*`ulimit -n 65536`"):
            other.placed(1)


def test_none_of_it_has_a_name(both):
    both.send(both.placed(1))
    assert not list(Path("/dev/shm").glob("*cellfeed*"))


class Child:
    """A forked process, which answers whether something holds once it is asked."""

    def __init__(self, holds):
        asked, self._ask = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._ask)
            os.read(asked, 1)
            os._exit(0 if holds() else 1)
        os.close(asked)

    def answer(self):
        """Ask, and wait for the end."""
        os.close(self._ask)
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1]) == 0


@pytest.mark.process
class TestForks:
    """A process that is forked while minibatches are in use sees them as they were."""

    def test_of_a_worker_write_nowhere_else(self, both):
        placed = both.placed(1)
        address = placed.ctypes.data
        del placed
        assert Child(lambda: both.placed(2).ctypes.data != address).answer()
        assert both.placed(3).ctypes.data == address

    def test_hinder_that_memory_is_used_again(self, both):
        received = [both.send(both.placed(7))]
        child = Child(lambda: received[0].tolist() == [7] * N_VALUES)
        del received[:]
        addresses = set()
        for k in range(10):
            addresses.add(both.placed(k).ctypes.data)
            both.send(both.placed(k))
        assert child.answer()
        n_before = len(addresses)
        for k in range(10):
            addresses.add(both.placed(k).ctypes.data)
            both.send(both.placed(k))
        assert len(addresses) == n_before + 1  # what the fork has kept is used again

    def test_do_not_give_back_what_they_drop(self, both):
        received = [both.send(both.placed(7))]

        def drop():
            del received[:]
            both.send(None)
            both.arrivals = None
            return True

        assert Child(drop).answer()
        for k in range(5):
            both.send(both.placed(k))
        assert received[0].tolist() == [7] * N_VALUES

    def test_see_memory_that_outlives_the_workers(self, both):
        received = [both.send(both.placed(7)), both.send(both.placed(8))]
        child = Child(lambda: received[0].tolist() == [7] * N_VALUES)
        del received[0]
        both.end_workers()
        other = Both()
        other.send(None)
        assert child.answer()
        assert received[0].tolist() == [8] * N_VALUES
        other.close()

    def test_of_a_fork(self, both):
        received = [both.send(both.placed(7))]

        def holds():
            return Child(lambda: received[0].tolist() == [7] * N_VALUES).answer()

        child = Child(holds)
        del received[:]
        for k in range(5):
            both.send(both.placed(k))
        assert child.answer()

    def test_see_a_minibatch_of_a_loader(self, write_h5ad):
        matrix = sp.random(600, 900, density=0.2, dtype=np.float32, random_state=0).tocsr()
        collection = open_collection(write_h5ad(matrix))
        loader = CellDataset(collection, BlockShuffling(4), 32, 4, seed=0, dense=True).loader(1)
        minibatches = iter(loader)
        held = [next(minibatches)]
        expected = matrix[held[0].rows.numpy()].toarray()
        child = Child(lambda: np.array_equal(held[0].X.numpy(), expected))
        del held[:]
        for _ in minibatches:
            pass
        assert child.answer()


@pytest.mark.process
def test_an_interrupt_while_it_is_freed(monkeypatch):
    """In a destructor, it would be printed and ignored, and training would go on."""
    keep_only, armed = SharedFile.keep_only, [True]

    def interrupted(file, ranges):
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGINT)
        keep_only(file, ranges)

    dataset = CellDataset(np.ones((64, 16384), np.float32), Streaming(), 4, seed=0)
    monkeypatch.setattr(SharedFile, "keep_only", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sum(1 for _ in dataset.loader(1))
