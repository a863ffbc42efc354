"""Memory of buffers and tables: no more than is stated, however often and however many cells."""

import multiprocessing
import pickle
import textwrap
import threading
import weakref
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.bytes.files import settle
from tests.loader.matrices import dense
from tests.warm import python as warm

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.bytes import _buffers
from cellfeed.bytes._buffers import BufferPool


def take_and_tell(pool: BufferPool, connection) -> None:
    connection.send(pool.acquire(10_000).array(np.dtype(np.uint8), 10_000).size)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_takes_memory():
    pool = BufferPool()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _buffers._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=take_and_tell, args=(pool, sending), daemon=True)
    child.start()
    try:
        assert receiving.poll(60)
        assert receiving.recv() == 10_000
    finally:
        child.kill()
        child.join()
        done.set()
        thread.join()


def test_memory_returns_with_the_last_array_over_it():
    pool = BufferPool()
    numbers = pool.acquire(10_000).array(np.dtype(np.int32), 100)
    part = numbers[50:]
    address = numbers.ctypes.data
    del numbers
    assert pool.acquire(10_000).address != address
    del part
    assert pool.acquire(10_000).address == address


class MappedBytes:
    """Counts what is mapped at the same time."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        self._mapped = _buffers.mapped
        monkeypatch.setattr(_buffers, "mapped", self.map)

    def map(self, capacity):
        memory = self._mapped(capacity)
        self.now += capacity
        self.most = max(self.most, self.now)
        weakref.finalize(memory, self.unmap, capacity)
        return memory

    def unmap(self, capacity):
        self.now -= capacity


@pytest.mark.parametrize("block_size", [1, 16])
def test_epochs_take_what_is_stated_and_no_more_each_time(write_h5ad, monkeypatch, block_size):
    matrix = sp.random(4000, 400, density=0.3, format="csr", dtype=np.float32, random_state=0)
    mapped = MappedBytes(monkeypatch)
    collection = open_collection(write_h5ad(matrix))
    dataset = CellDataset(collection, BlockShuffling(block_size), 32, fetch_factor=20, seed=0)
    after = []
    for _ in range(8):
        for _minibatch in dataset:
            pass
        del _minibatch
        after.append(mapped.now)
    assert mapped.most <= 1.25 * dataset.buffer_bytes
    # How much is held depends a little on which thread came first.
    assert max(after[4:]) <= 1.05 * max(after[:4])


# Tables of many cells


def write_rows(path, n_rows):
    """Write many rows, of which a few have an element."""
    pointer = np.arange(n_rows + 1) // 1000
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        for name, n in (("obs", n_rows), ("var", 3)):
            group = file.create_group(name)
            group.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0"})
            group.attrs["_index"] = "_index"
            group.attrs["column-order"] = np.empty(0, "S1")
            index = group.create_dataset("_index", (n,), "i4", chunks=(n,))
            index.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        X = file.create_group("X")
        X.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
        X.attrs["shape"] = (n_rows, 3)
        X.create_dataset("data", data=np.ones(pointer[-1], "f4"), chunks=(100,))
        X.create_dataset("indices", data=np.ones(pointer[-1], "i4"), chunks=(100,))
        X.create_dataset("indptr", data=pointer, chunks=(100_000,), compression="gzip")
    return path


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_copies_read_by_kept_tables(tmp_path, monkeypatch, num_workers):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path))
    settle(monkeypatch)
    path = write_rows(tmp_path / "a.h5ad", 200_000)
    open_collection(path).load_tables()
    kept = max((tmp_path / "tables").iterdir(), key=lambda file: file.stat().st_size)
    used = kept.stat().st_mtime_ns
    dataset = CellDataset(open_collection(path), BlockShuffling(16), batch_size=25_000, seed=0)
    copy, seen = pickle.loads(pickle.dumps(dataset)), list[int]()
    context = "fork" if num_workers else None
    for minibatch in copy.loader(num_workers=num_workers, multiprocessing_context=context):
        rows = np.asarray(minibatch.rows)
        expected = np.zeros((rows.size, 3), np.float32)
        expected[(rows + 1) % 1000 == 0, 1] = 1
        assert (dense(minibatch.X) == expected).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(200_000))
    assert kept.stat().st_mtime_ns > used


TELL_MEMORY = """
    import re, sys
    from pathlib import Path
    import numpy as np
    from cellfeed import BlockShuffling, CellDataset, open_collection
    from cellfeed.bytes import _location

    _location._SETTLED_NS = -1

    def anonymous_bytes():
        told = Path("/proc/self/smaps_rollup").read_text()
        return 1024 * int(re.search(r"Anonymous: *(\\d+)", told)[1])

    def read(path):
        collection = open_collection(path)
        collection.load_tables()
        rows = np.linspace(0, len(collection) - 1, 100).astype(np.int64)
        return collection, collection[rows].X.nnz

    small = read(sys.argv[1])
    before = anonymous_bytes()
    large = read(sys.argv[2])
    print(anonymous_bytes() - before)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells of memory")
def test_memory_of_a_process_does_not_grow_with_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    settle(monkeypatch)
    small, large = (write_rows(tmp_path / f"{n}.h5ad", n) for n in (200_000, 4 << 20))
    open_collection(large).load_tables()  # the first opening, in another process
    told = warm.output_of("-c", textwrap.dedent(TELL_MEMORY), small, large)
    assert int(told) < 8 << 20  # the row pointer takes 32 MiB
