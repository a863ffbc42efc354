"""Interface to the files or objects from which the bytes of chunks are read; local files."""

import concurrent.futures.thread as futures_threads
import itertools
import os
import select
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes._location import (
    Identity,
    LastingIdentity,
    Location,
    broken_link,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed.machine import share_of_descriptors


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


# Local files in a folder, by number; they stay open unless there are too many.

_SHARE_OF_OPEN_FILES = 4  # of what the process may still open; others are the user's program's
_MOST_LOOKED_AT = 100_000  # files of a folder, which takes 0.2 s

_ABSENT: Identity = (-1, -1)


class FolderFiles(ByteStore):
    """Files of a folder, which must not change, and which compiled threads read.

    Descriptors belong to the process that opened them. If there are too many files to keep open,
    they are opened for each read, by path.

    Parameters
    ----------
    folder
        The folder, as the user gave it.
    names
        Returns the names of files within the folder, which may contain ``/``, by number.
    n_files
        Number of files; 0 if they do not ``stay_open``.
    stay_open
        Whether files are opened once, and must not change. Otherwise they are opened for each read,
        by path, and may change.
    check
        Called after each read, to check what belongs to the files, such as their metadata.
    """

    def __init__(
        self,
        folder: Path,
        names: Callable[[NDArray[np.int64]], NDArray[np.bytes_]],
        n_files: int,
        *,
        stay_open: bool = True,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._folder = folder
        self._absolute = folder.absolute()  # it stays the same where the working folder changes
        self._names, self._stay_open, self._check = names, stay_open, check
        found = self._found(np.arange(n_files, dtype=np.int64))
        self._identities = np.array(found, np.int64).reshape(n_files, 2)
        self._process = -1

    def _enter_process(self) -> None:
        """Drop descriptors of another process."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._descriptors = np.full(len(self._identities), -1, np.int64)
            self._open: list[OpenFile] = []

    def __getstate__(self) -> dict[str, Any]:
        own = ("_descriptors", "_open")  # of this process
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return state | {"_process": -1}

    def location_of(self, file: int) -> Location:
        """Return the location of a file, for messages."""
        return Location.of(self._folder / self._name(file))

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sizes in bytes, the first observed if files stay open; -1 for missing files."""
        if self._stay_open:
            return np.asarray(self._identities[files, 0])
        return np.array([size for size, _ in self._found(files)], np.int64)

    def identity(self) -> LastingIdentity | None:
        """Return the identity of all files in the folder; None if there are too many to check."""
        return identity_of_files(self._absolute)

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return descriptors or addresses of paths; see `ByteStore`."""
        if not self._stay_open:
            return self._addresses(files)
        self._enter_process()
        self._open_those(np.unique(files))
        handles = self._descriptors[files]
        is_closed = (handles < 0) & (self.sizes(files) >= 0)
        # One address for each file, so that chunks beside each other are read together.
        distinct, numbers = np.unique(files[is_closed], return_inverse=True)
        addresses, paths = self._addresses(distinct)
        handles[is_closed] = addresses[numbers]
        return handles, (paths, self._open)

    def check_files(self, files: NDArray[np.int64]) -> None:
        """Check files that stay open; see `ByteStore`."""
        if self._check is not None:
            self._check()
        if self._stay_open:
            distinct = np.unique(files)
            for file, found in zip(distinct.tolist(), self._found(distinct), strict=True):
                self._compare(file, found)

    def read_ranges(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> list[bytes | None]:
        """Read byte ranges, one after another; see `ByteStore`."""
        ranges = zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        found = [self._read(*each) for each in ranges]
        self.check_files(files)
        return found

    def _read(self, file: int, first: int, n_bytes: int) -> bytes | None:
        try:
            with self._path(file).open("rb") as opened:
                opened.seek(first)
                return opened.read(n_bytes)
        except FileNotFoundError:
            return None

    def _found(self, files: NDArray[np.int64]) -> list[Identity]:
        """Return the current identities of files."""
        folder = os.fsencode(self._absolute)
        names = self._names(files).tolist()
        return [_identity_of(folder + b"/" + name) for name in names]

    def _compare(self, file: int, found: Identity) -> None:
        if found == tuple(self._identities[file].tolist()):
            return
        where = self.location_of(file)
        raise removed(where) if found == _ABSENT else replaced(where)

    def _open_those(self, files: NDArray[np.int64]) -> None:
        is_closed = (self._descriptors[files] < 0) & (self.sizes(files) >= 0)
        if not is_closed.any():
            return
        for file in files[is_closed][: OpenFile.n_more()].tolist():
            try:
                opened = OpenFile(self._path(file))
            except FileNotFoundError:
                self._compare(file, _identity_of(os.fsencode(self._path(file))))
                raise  # it is there again
            self._compare(file, identity(os.fstat(opened.descriptor)))
            self._open.append(opened)
            self._descriptors[file] = opened.descriptor

    def _addresses(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return minus the address of each path, and the paths."""
        folder = os.fsencode(self._absolute) + b"/"
        paths = np.char.add(np.char.add(folder, self._names(files)), b"\0")
        width = paths.dtype.itemsize + 1  # NumPy leaves out a zero that is at the end
        paths = paths.astype(f"S{width}")
        return -(paths.ctypes.data + np.arange(len(files), dtype=np.int64) * width), paths

    def _name(self, file: int) -> str:
        return os.fsdecode(self._names(np.array([file], np.int64))[0])

    def _path(self, file: int) -> Path:
        return self._absolute / self._name(file)


class OpenFile:
    """A file that is open for reading as long as this object exists."""

    _all: ClassVar[list[weakref.ref["OpenFile"]]] = []

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._closing = closed_with(self.descriptor)
        OpenFile._all.append(weakref.ref(self))

    @staticmethod
    def n_more() -> int:
        """Return how many more files of all collections this process may keep open."""
        OpenFile._all = [each for each in OpenFile._all if each() is not None]
        n_open = len(OpenFile._all)
        return max(0, share_of_descriptors(_SHARE_OF_OPEN_FILES, n_open) - n_open)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the paths of all files in a folder, and in folders that links in it lead to."""
    for where, _, names in os.walk(folder, followlinks=True):
        yield from (Path(where, name) for name in names)


def identity_of_files(folder: Path) -> LastingIdentity | None:
    """Return the identity of all files in a folder; None if there are too many to check."""
    files = sorted(itertools.islice(files_below(folder), _MOST_LOOKED_AT + 1))
    if len(files) > _MOST_LOOKED_AT:
        return None
    try:
        return lasting_identity((str(file), file.stat()) for file in files)
    except OSError:
        return None  # one was removed meanwhile


def _identity_of(path: bytes) -> Identity:
    try:
        return identity(os.stat(path))  # noqa: PTH116 - Path.stat takes twice as long
    except FileNotFoundError:
        if os.path.islink(path):  # noqa: PTH114 - bytes
            raise broken_link(Path(os.fsdecode(path))) from None
        return _ABSENT
