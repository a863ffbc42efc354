"""Files in a folder, by number; they stay open unless there are too many."""

import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import (
    ByteStore,
    Identity,
    LastingIdentity,
    Location,
    broken_link,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed.bytes._store import closed_with
from cellfeed.decode._zarr import ZarrLayout
from cellfeed.machine import share_of_descriptors

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
    """

    def __init__(
        self,
        folder: Path,
        names: Callable[[NDArray[np.int64]], NDArray[np.bytes_]],
        n_files: int,
        *,
        stay_open: bool = True,
    ) -> None:
        self._folder = folder
        self._absolute = folder.absolute()  # it stays the same where the working folder changes
        self._names, self._stay_open = names, stay_open
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


# The files of a zarr array: shards, which stay open, and files of single chunks.


class ZarrFiles(FolderFiles):
    """The files of one array.

    A shard is read often, so its file stays open unless there are too many. Other files are
    opened for each read, by path, and may change.

    Parameters
    ----------
    folder
        The array's folder, as the user gave it.
    layout
        Layout of the array.
    check_metadata
        Raises an error if the array's metadata has changed.
    """

    def __init__(
        self, folder: Path, layout: ZarrLayout, check_metadata: Callable[[], None]
    ) -> None:
        n_files = math.prod(layout.file_grid) if layout.sharded else 0
        super().__init__(folder, layout.file_names, n_files, stay_open=layout.sharded)
        self._check_metadata = check_metadata

    def check_files(self, files: NDArray[np.int64]) -> None:
        """Check the metadata, and shards; see `ByteStore`."""
        self._check_metadata()
        super().check_files(files)
