import multiprocessing
import threading
import weakref

import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed._bytes import _buffers
from cellfeed._bytes._buffers import BufferPool


def take_and_tell(pool: BufferPool, connection) -> None:
    connection.send(pool.acquire(10_000).array(np.dtype(np.uint8), 10_000).size)


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
    matrix = sp.random(6000, 400, density=0.3, format="csr", dtype=np.float32, random_state=0)
    mapped = MappedBytes(monkeypatch)
    dataset = CellDataset(
        open_collection(write_h5ad(matrix)),
        BlockShuffling(block_size=block_size),
        batch_size=32,
        fetch_factor=20,
        seed=0,
    )
    after = []
    for _ in range(8):
        for _minibatch in dataset:
            pass
        del _minibatch
        after.append(mapped.now)
    assert mapped.most <= 1.25 * dataset.buffer_bytes
    # How much is held depends a little on which thread came first.
    assert max(after[4:]) <= 1.05 * max(after[:4])
