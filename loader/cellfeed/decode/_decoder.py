"""The threads that decode chunks, and how often chunks are checked."""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum, auto
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes._buffers import BufferPool, SharedFile, can_lend
from cellfeed.decode import _kernels as kernels

# Counters of a dataset's work and time, to which all its processes add.


class Counter(IntEnum):
    """The counters; for stages, nanoseconds summed over all threads."""

    FETCHES = 0
    MINIBATCHES = auto()
    CELLS = auto()
    CHUNKS = auto()
    BYTES_READ = auto()
    BYTES_DECOMPRESSED = auto()
    BYTES_USED = auto()
    TOKENS = auto()
    UNKNOWN = auto()
    PLANNING = auto()
    READING = auto()
    DECOMPRESSING = auto()
    PLACING = auto()
    LIBRARY = auto()
    DENSIFYING = auto()
    TOKENIZING = auto()
    MAKING_TENSORS = auto()
    FUNCTIONS = auto()
    SENDING = auto()
    WAITING = auto()
    TRAINING = auto()


class Counters:
    """Counters that only grow, shared by threads and forked processes.

    Spawned processes share them too, if the system has files in memory (Linux). Otherwise, pickled
    counters start at 0 again.
    """

    __slots__ = (
        "__weakref__",
        "_addresses",
        "_all",
        "_counts",
        "_non_counts",
        "_spawned",
        "has_warned_of",
        "parts",
    )

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        memory = mmap.mmap(-1, mmap.PAGESIZE) if memory is None else memory
        n = len(Counter)
        self._all = np.frombuffer(memory, np.int64, n + 2)
        self._counts, self._non_counts = self._all[:n], self._all[n:]
        first = self._counts.ctypes.data
        self._addresses = [first + 8 * int(each) for each in Counter]
        self._spawned: tuple[SharedFile, Counters] | None = None
        self.has_warned_of = set[int]()  # by number of the doubt
        self.parts: Sequence[Counters] = ()  # those of interleaved datasets

    def add(self, counter: Counter, n: int) -> None:
        """Add to a counter."""
        kernels.count(self._addresses[counter], n)

    def processor_time(self, counter: Counter) -> AbstractContextManager[None]:
        """Add the CPU time of this thread in a block."""
        return self._timed(counter, time.thread_time_ns)

    def wall_time(self, counter: Counter) -> AbstractContextManager[None]:
        """Add the elapsed time of a block."""
        return self._timed(counter, time.perf_counter_ns)

    @contextmanager
    def _timed(self, counter: Counter, clock: Callable[[], int]) -> Iterator[None]:
        begin = clock()
        try:
            yield
        finally:
            self.add(counter, clock() - begin)

    @property
    def values(self) -> NDArray[np.int64]:
        """Return the current values of all counters, int64, shape (n_counters,)."""
        own = self._counts.copy()
        return own if self._spawned is None else own + self._spawned[1].values

    @property
    def address_of_non_counts(self) -> int:
        """Address of what `non_counts` returns, two int64."""
        return int(self._non_counts.ctypes.data)

    @property
    def non_counts(self) -> tuple[int, int]:
        """How often so far what was transformed may not have been counts.

        Values of which `Log1p` is NaN or -infinity, and rows that the first step, `NormalizeTotal`,
        found to have a total that is no integer.
        """
        n_undefined, n_fractional = self._non_counts.tolist()
        spawned = () if self._spawned is None else (self._spawned[1],)
        for of_each in (each.non_counts for each in (*spawned, *self.parts)):
            n_undefined += of_each[0]
            n_fractional += of_each[1]
        return n_undefined, n_fractional

    def __reduce__(self) -> tuple[Any, ...]:
        state = (None, {"parts": self.parts})
        if get_spawning_popen() is None or not can_lend():
            return Counters, (), state
        if self._spawned is None:
            try:
                file = SharedFile(label="cellfeed-counters")
                os.ftruncate(file.descriptor, mmap.PAGESIZE)
                self._spawned = file, _opened(file)
            except OSError:  # no descriptor is left, say: what it does is not counted
                return Counters, (), state
        return _opened, (self._spawned[0],), state


def _opened(file: SharedFile) -> Counters:
    return Counters(mmap.mmap(file.descriptor, mmap.PAGESIZE))


Verify: TypeAlias = Literal["first", "always", "never"]


@dataclass(frozen=True, slots=True)
class Decoder:
    """Threads that decode chunks, and a policy for decompressing chunks to their end.

    Checksums and sizes can only be checked at the end of a chunk.

    Parameters
    ----------
    threads, num_threads
        The threads and their number; the calling thread if None.
    verify
        "first": a chunk is decompressed completely the first time that it is read by this process
        or by another one that was forked from the process that opened its file, and after that only
        as far as its elements are needed; "always": completely each time; "never".
    counters
        Counters of bytes, chunks and time.
    pool
        Memory for lists of selected elements. (Allocating it for each fetch costs more, in page
        faults, than filling it.)
    """

    threads: Executor | None = None
    num_threads: int = 1
    verify: Verify = "first"
    counters: Counters = field(default_factory=Counters)
    pool: BufferPool = field(default_factory=BufferPool)


# Why an array is read slowly.


@dataclass(frozen=True, slots=True)
class SlowRead:
    """Why cellfeed does not decode an array, which the format's library reads slowly instead.

    Parameters
    ----------
    library
        The library, such as ``"h5py"``.
    reason
        The reason, such as ``"filter blosc2 is not supported"``.
    remedy
        What the user can do so that it is read fast.

    Examples
    --------
    >>> print(SlowRead("h5py", "filter blosc2 is not supported"))
    through h5py: filter blosc2 is not supported
    """

    library: str
    reason: str
    remedy: str = "write it again with anndata"

    def __str__(self) -> str:
        return f"through {self.library}: {self.reason}"
