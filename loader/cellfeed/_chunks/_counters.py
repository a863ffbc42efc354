"""What was done, and for how long: counters of a data set, which all of its processes add to."""

import mmap
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, auto
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels

__all__ = ["Counter", "Counters"]


class Counter(IntEnum):
    """What is counted; of stages, nanoseconds over all threads that do them."""

    FETCHES = 0
    MINIBATCHES = auto()
    CELLS = auto()
    CHUNKS = auto()
    BYTES_READ = auto()
    BYTES_DECOMPRESSED = auto()
    PLANNING = auto()
    READING = auto()
    DECOMPRESSING = auto()
    PLACING = auto()
    LIBRARY = auto()
    DENSIFYING = auto()
    MAKING_TENSORS = auto()
    FUNCTIONS = auto()
    WAITING = auto()
    TRAINING = auto()


class Counters:
    """Counters that only grow; threads and forked processes add to the same ones.

    So do spawned processes where the system has files in memory (Linux). Pickled otherwise, they
    begin at 0 again.
    """

    __slots__ = ("__weakref__", "_address", "_counts", "_spawned")

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        memory = mmap.mmap(-1, mmap.PAGESIZE) if memory is None else memory
        self._counts = np.frombuffer(memory, np.int64, len(Counter))
        self._address: int = self._counts.ctypes.data
        self._spawned: _Spawned | None = None

    def add(self, counter: Counter, n: int) -> None:
        """Add to a counter."""
        kernels.count(self._address + 8 * counter, n)

    @contextmanager
    def processor_time(self, counter: Counter) -> Iterator[None]:
        """Add the processor time that this thread takes for the block."""
        begin = time.thread_time_ns()
        try:
            yield
        finally:
            self.add(counter, time.thread_time_ns() - begin)

    @contextmanager
    def wall_time(self, counter: Counter) -> Iterator[None]:
        """Add the time that the block takes."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(counter, time.perf_counter_ns() - begin)

    @property
    def values(self) -> NDArray[np.int64]:
        """Return all counters as they are now, int64, shape (n_counters,)."""
        own = self._counts.copy()
        return own if self._spawned is None else own + self._spawned.counters.values

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None or not hasattr(os, "memfd_create"):
            return Counters, ()
        if self._spawned is None:
            self._spawned = _Spawned()
        return _opened, (DupFd(self._spawned.descriptor),)


class _Spawned:
    """Counters of processes that were spawned, in a file in memory."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("cellfeed-counters", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self.counters = Counters(mmap.mmap(self.descriptor, mmap.PAGESIZE))


def _opened(file: Any) -> Counters:
    descriptor = file.detach()
    try:
        return Counters(mmap.mmap(descriptor, mmap.PAGESIZE))
    finally:
        os.close(descriptor)
