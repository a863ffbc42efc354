import multiprocessing
import threading

import numpy as np
import pytest

from cellfeed._memory import MemoryPool


def take_and_tell(pool: MemoryPool, connection) -> None:
    connection.send(pool.take(10_000).array(np.dtype(np.uint8), 10_000).size)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_takes_memory():
    pool = MemoryPool()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
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
    pool = MemoryPool()
    numbers = pool.take(10_000).array(np.dtype(np.int32), 100)
    part = numbers[50:]
    address = numbers.ctypes.data
    del numbers
    assert pool.take(10_000).address != address
    del part
    assert pool.take(10_000).address == address
