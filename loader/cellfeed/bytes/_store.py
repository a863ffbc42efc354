"""Interface to the files or objects from which the bytes of chunks are read."""

import concurrent.futures.thread as futures_threads
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes._location import LastingIdentity, Location


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Byte ranges that arrive together.

    Parameters
    ----------
    ranges
        Indices of the ranges among the requested ones, shape (n,).
    is_here
        A future that is done once `ByteStore.read_ranges` returns or raises without waiting.
    owner
        An object that keeps the requests and the received bytes alive.
    """

    ranges: NDArray[np.intp]
    is_here: Future[None]
    owner: object


class ByteStore(ABC):
    """The files or objects of an array, numbered from 0; one for HDF5, many for zarr.

    Derive from it to decode chunks whose bytes are not in local files. Override either `handles`,
    for files that compiled threads read themselves, or `read_ranges`, which returns bytes in
    memory, from which chunks are decoded without a copy. Neither is needed with `memory`.
    """

    @property
    def memory(self) -> NDArray[np.uint8] | None:
        """The bytes of the only file, if they are in memory before they are read; else None."""
        return None

    @abstractmethod
    def location_of(self, file: int) -> Location:
        """Return the location of a file, for messages."""

    @abstractmethod
    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of files in bytes, -1 for missing files, int64, shape (n,)."""

    def identity(self) -> LastingIdentity | None:
        """Return an identifier that changes when the files are replaced.

        Tables that locate chunks are cached under it between openings; if it is None, they are not
        cached.
        """
        return None

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object] | None:  # noqa: ARG002 - for subclasses
        """Return handles with which compiled threads read files; None to use `read_ranges`.

        Parameters
        ----------
        files
            Numbers of files, int64, shape (n,).

        Returns
        -------
        For each file, its descriptor, or minus the address of its null-terminated path; and an
        owner object, which is kept alive while the files are read.

        Raises
        ------
        FormatError
            A file was replaced since the array was opened.
        """
        return None

    def check_files(self, files: NDArray[np.int64]) -> None:  # noqa: B027 - for subclasses
        """Check that files are as they were when they were first seen; called after each read.

        By default, nothing is checked: bytes in memory come from files that were.

        Parameters
        ----------
        files
            Numbers of files, int64, shape (n,).

        Raises
        ------
        FormatError
            One was replaced or written to.
        PathError
            One was removed.
        """

    def expect(
        self,
        files: NDArray[np.int64],  # noqa: ARG002 - for subclasses
        offsets: NDArray[np.int64],  # noqa: ARG002
        sizes: NDArray[np.int64],  # noqa: ARG002
    ) -> object | None:
        """Start requesting byte ranges that `read_ranges` will read, without waiting.

        This is called from another thread than `read_ranges`, for several fetches before the first
        of them is read.

        Parameters
        ----------
        files, offsets, sizes
            All ranges of one fetch, in the order in which its chunks are decoded; see
            `read_ranges`. These ranges, or parts of them, are read later in any order, possibly
            twice or never.

        Returns
        -------
        An object that keeps the requests alive. When it is dropped, bytes that have not been read
        are discarded. None if nothing is requested ahead.
        """
        return None

    def arrivals(
        self,
        files: NDArray[np.int64],  # noqa: ARG002 - for subclasses
        offsets: NDArray[np.int64],  # noqa: ARG002
        sizes: NDArray[np.int64],  # noqa: ARG002
    ) -> Sequence[Arrival] | None:
        """Return the arrivals of byte ranges, so that early ones are decoded while others arrive.

        This also starts requesting ranges that were not expected, without waiting.

        Parameters
        ----------
        files, offsets, sizes
            See `read_ranges`.

        Returns
        -------
        Arrivals that contain each range once; None to call `read_ranges` once for all ranges.
        """
        return None

    def read_ranges(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[bytes | memoryview | NDArray[np.uint8] | None]:
        """Read byte ranges of files.

        Parameters
        ----------
        files, offsets, sizes
            Number of the file, first byte and number of bytes of each range, int64, shape (n,).

        Returns
        -------
        For each range its bytes, in memory that does not change while they are referenced, such as
        `bytes` or a slice of a larger `memoryview`; fewer bytes if the file ends before the range,
        and None if there is no such file.

        Raises
        ------
        FormatError
            A file was replaced since the array was opened, or cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} must override `handles` or `read_ranges`")


# File descriptors that are closed without a destructor in Python.
#
# If Ctrl-C arrived in one, it would be printed and ignored, and the descriptor would stay open.


def closed_with(descriptor: int) -> object:
    """Return an object that closes a file descriptor when nothing refers to it any longer.

    It is the only object of the standard library that takes any descriptor and closes it
    silently, in C, and is used only for that.
    """
    queue = "epoll" if hasattr(select, "epoll") else "kqueue"  # Linux, and BSD with macOS
    closing: object = getattr(select, queue).fromfd(descriptor)
    return closing


# Cancelling threads that wait for bytes which may never arrive.

LOOK_UP_SECONDS = 0.2  # between checks whether anybody still waits for the result


class _Own(threading.local):
    left: tuple[threading.Event, ...] = ()


_own = _Own()


def set_cancel_events(*left: threading.Event) -> None:
    """Cancel the waits of this thread once one of ``left`` is set."""
    _own.left = left


@contextmanager
def cancellable_threads(num_threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Provide threads that stop waiting when the block is left, or when this thread stops."""
    left = threading.Event()
    with ThreadPoolExecutor(
        num_threads,
        thread_name_prefix=name,
        initializer=set_cancel_events,
        initargs=(left, *_own.left),
    ) as threads:
        try:
            yield threads
        finally:
            left.set()


def is_cancelled() -> bool:
    """Return whether this thread must stop waiting, as it must once Python exits."""
    # Python joins the threads of executors before it marks the main thread as ended.
    is_ending = getattr(futures_threads, "_shutdown", False)
    is_left = any(each.is_set() for each in _own.left)
    return is_ending or is_left or not threading.main_thread().is_alive()
