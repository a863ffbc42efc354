"""The folder of a token stream, on this machine, a web server or an object store: its files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import (
    ByteStore,
    CachedTables,
    Location,
    RemoteObjects,
    digest_of,
    map_or_read,
    refuse_pipe,
    versions_below,
    versions_of,
)
from cellfeed.extending import CellfeedError, FormatError, PathError
from cellfeed.sources import files_in

_PIECE_BYTES = 1 << 22
_PIECES_AT_ONCE = 8
_MOST_OBJECTS = 1_000_000


class LocalFolder:
    """A folder of this machine.

    Parameters
    ----------
    location
        The folder.

    Raises
    ------
    PathError
        There is no such folder.
    """

    def __init__(self, location: Location) -> None:
        path = location.path
        if path is None or not path.is_dir():
            raise PathError(f"{location.shown}: no such folder; check the path")
        self.location, self._path = location, path.absolute()

    def names(self) -> list[str]:
        """Return the names of what is in it."""
        try:
            return sorted(os.listdir(self._path))  # noqa: PTH208 - only names
        except OSError as error:
            raise unreadable(self.location, error) from error

    def _file(self, name: str) -> Path:
        """Return the path of a file; refuse a pipe, since opening it would wait for ever."""
        path = self._path / name
        refuse_pipe(path)
        return path

    def contents(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small files."""
        return [self._content(name) for name in names]

    def _content(self, name: str) -> bytes:
        try:
            return self._file(name).read_bytes()
        except OSError as error:
            raise unreadable(self.location / name, error) from error

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the sizes of files in bytes, None for those that are missing."""
        return [self._size(name) for name in names]

    def _size(self, name: str) -> int | None:
        try:
            return (self._path / name).stat().st_size
        except OSError:
            return None

    def files(self, names: Sequence[str]) -> ByteStore:
        """Return files, numbered in this order."""
        return files_in(self._path, names)

    def table(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a file, memory-mapped; read if too many are mapped already."""
        try:
            return map_or_read(self._file(name))
        except (OSError, ValueError) as error:
            raise unreadable(self.location / name, error) from error

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file."""
        with self._file(name).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def version(self) -> str | None:
        """Return None: the files themselves are looked at."""
        return None


class RemoteFolder:
    """A folder of a web server or an object store.

    Each answer of the server states the version of the object; versions other than the one that was
    first seen are refused.

    Parameters
    ----------
    location
        The folder.
    names
        Names of folders in it, where it cannot be listed: on a web server.

    Raises
    ------
    PathError
        The folder cannot be listed.
    """

    def __init__(self, location: Location, names: Sequence[str] | None) -> None:
        self.location = Location(location.text.rstrip("/"), location.options)
        listed = versions_below(self.location, _MOST_OBJECTS)
        if listed is None and names is None:
            msg = f"{location}: its shards cannot be listed; name them, as in"
            raise PathError(f"{msg} cellfeed.TokenStream({location.text!r}, shards=['a', 'b'])")
        self._names = names if listed is None else None
        self._versions = {} if listed is None else listed

    def names(self) -> list[str]:
        """Return the names of what is in it."""
        if self._names is not None:
            return sorted(self._names)
        return sorted({name.partition("/")[0] for name in self._versions})

    def contents(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small files."""
        for name, size in zip(names, self.sizes(names), strict=True):
            if size is None:
                raise PathError(f"{self.location / name}: no such object; check the URL")
        sizes = np.array([self._versions[name].size for name in names], np.int64)
        files = np.arange(len(names), dtype=np.int64)
        found = self.files(names).read_ranges(files, np.zeros_like(files), sizes)
        whole = map(self._whole, names, found, sizes.tolist())
        return [bytes(each) for each in whole]

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the sizes of objects in bytes, None for those that are missing."""
        if self._names is not None:
            unknown = [name for name in names if name not in self._versions]
            self._versions |= versions_of(self.location, unknown)
        versions = map(self._versions.get, names)
        return [None if each is None else each.size for each in versions]

    def files(self, names: Sequence[str]) -> RemoteObjects:
        """Return objects, numbered in this order."""
        versions = [self._versions.get(name) for name in names]
        return RemoteObjects(partial(_below, self.location, names), versions.__getitem__)

    def table(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of an object, which are cached on this machine if they are many."""

        def read() -> Mapping[str, NDArray[Any]]:
            pieces = [np.frombuffer(each, np.uint8) for each in self.pieces(name)]
            return {"bytes": np.concatenate(pieces or [np.empty(0, np.uint8)])}

        identity = self.files([name]).identity
        cached = CachedTables(str(self.location), name, identity)
        return cached.get("bytes", self._versions[name].size, read)["bytes"]

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object."""
        size, objects = self._versions[name].size, self.files([name])
        for begin in range(0, size, _PIECES_AT_ONCE * _PIECE_BYTES):
            end = min(size, begin + _PIECES_AT_ONCE * _PIECE_BYTES)
            firsts = np.arange(begin, end, _PIECE_BYTES, dtype=np.int64)
            counts = np.minimum(firsts + _PIECE_BYTES, end) - firsts
            found = objects.read_ranges(np.zeros_like(firsts), firsts, counts)
            for content, count in zip(found, counts.tolist(), strict=True):
                yield bytes(self._whole(name, content, count))

    def version(self) -> str | None:
        """Return a digest of the versions of all objects; None if one has none."""
        tags = {name: each.etag for name, each in sorted(self._versions.items())}
        return None if None in tags.values() else digest_of(repr(tags))

    def _whole(self, name: str, found: Any, size: int) -> Any:
        if found is None or len(found) != size:
            raise FormatError(f"{self.location / name}: is shorter than expected; upload it again")
        return found


def _below(folder: Location, names: Sequence[str], number: int) -> Location:
    return folder / names[number]


Folder = LocalFolder | RemoteFolder


def unreadable(where: Location, error: Exception) -> CellfeedError:
    """Return the error for a file of a shard that could not be read, with the remedy."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        msg = f"{where}: too many files are open; allow more, for example with `ulimit -n 65536`"
        return PathError(msg)
    if isinstance(error, PermissionError):
        return PathError(f"{where}: permission to read is denied; check its permissions")
    return damaged(where, f"cannot be read ({error})")


def damaged(where: Location, what: str) -> FormatError:
    """Return the error for a file whose contents are wrong."""
    return FormatError(f"{where}: {what}; the shard is damaged, copy or write it again")
