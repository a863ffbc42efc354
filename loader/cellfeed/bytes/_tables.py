"""Tables cached between openings: where rows and chunks lie in large files."""

import json
import logging
import mmap
import os
import sys
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from cellfeed._version import __version__
from cellfeed.bytes._location import LastingIdentity
from cellfeed.machine import cache_folder, share_of_descriptors

# One file of tables, in which any change is detected.
#
# It begins with the number of bytes of a description in JSON, and the description: the key, and the
# name, dtype and length of each table. They follow, each at a multiple of 64 bytes. It ends with
# the CRC-32 of all before it, which detects every change of up to four adjacent bytes, and all but
# one in four billion of the others.

Tables = Mapping[str, NDArray[Any]]

_ALIGNMENT = 64
_COUNT_BYTES = 4  # of the number of bytes, and of the checksum


def _encoded(key: bytes, tables: Tables) -> list[Any]:
    """Return a file of tables in parts; shapes are lost."""
    described = json.dumps(
        {
            "key": key.decode(),
            "tables": [[name, table.dtype.str, table.size] for name, table in tables.items()],
        }
    ).encode()
    parts, checksum = list[Any](), 0
    contents = (np.ravel(table).view(np.uint8) for table in tables.values())
    for part in (len(described).to_bytes(_COUNT_BYTES, "little") + described, *contents):
        parts += [part, bytes(-len(part) % _ALIGNMENT)]
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return [*parts, checksum.to_bytes(_COUNT_BYTES, "little")]


def _parsed(content: NDArray[np.uint8], key: bytes) -> Tables:
    """Return the tables in the content of a file, as views of it.

    Raises
    ------
    ValueError
        The content was not written for this key, or is damaged.
    """
    content, checksum = content[:-_COUNT_BYTES], content[-_COUNT_BYTES:].tobytes()
    if zlib.crc32(content.data).to_bytes(_COUNT_BYTES, "little") != checksum:
        raise ValueError("the checksum of a file of tables does not match")
    first = _COUNT_BYTES + int.from_bytes(content[:_COUNT_BYTES].tobytes(), "little")
    described = json.loads(content[_COUNT_BYTES:first].tobytes())
    if described["key"] != key.decode():
        raise ValueError("a file of tables belongs to other data")
    tables = dict[str, NDArray[Any]]()
    for name, dtype, size in described["tables"]:
        first += -first % _ALIGNMENT
        stop = first + size * np.dtype(dtype).itemsize
        tables[name], first = content[first:stop].view(dtype), stop
    return tables


# Tables of an array, computed once and found again by later openings of the same file.

Computed = TypeVar("Computed", Tables, Tables | None)

_logger = logging.getLogger(__name__)

_FORMAT = 1  # of the files, and of the meaning of their tables
_FEWEST_ENTRIES = 100_000  # fewer are read in less than 0.1 s, and take less than 2 MB
_MOST_BYTES = 5 * 10**9  # of the folder; enough for tables of 400 million cells and their chunks
_IN_USE_SECONDS = 24 * 3600  # for which a table stays after its last use
_SUFFIX, _UNFINISHED = ".tables", ".unfinished"


class CachedTables:
    """Tables computed from one stored array, cached in ``tables`` of the user's `cache_folder`.

    A cached table is memory-mapped, so its memory is that of the page cache, shared by all
    processes of the machine. Its key is the path of the storage, its identity, the array and the
    table's dependencies, and the versions of cellfeed and of the format; it is used only if its
    checksum is right. Without a working cache, tables are recomputed.

    The folder is bounded, and any number of processes write to it concurrently. Files are written
    under a temporary name and renamed, so each is complete, and a mapped file stays valid even if
    it is removed or replaced. Tables that have not been used for a day are evicted, oldest first,
    to make room for new ones; if that is not enough, nothing is written.

    Parameters
    ----------
    name
        The file or folder, absolute, or the URL.
    array
        Path of the array in the storage.
    identity
        Returns the current identity of the storage, None if it is not known.
    """

    def __init__(
        self, name: str, array: str, identity: Callable[[], LastingIdentity | None]
    ) -> None:
        self._name = name
        self._array = array
        self._identity = identity

    def get(
        self,
        depends_on: str,
        n_entries: int,
        compute: Callable[[], Computed],
        *,
        fewest: int | None = None,
    ) -> Computed | Tables:
        """Return tables: mapped if cached, otherwise computed, and cached if that is worth it.

        Parameters
        ----------
        depends_on
            Names the tables and what they depend on besides the content of the storage.
        n_entries
            Length of the longest table.
        compute
            Computes them; its exceptions are passed on. None if the tables cannot be computed.
        fewest
            Minimum number of entries to cache; by default, as many as take 0.1 s to read.
        """
        if not (are_many(n_entries) if fewest is None else n_entries >= fewest):
            return compute()
        before = self._identity()
        if before is None or not before.is_settled:
            return compute()
        key = _key(self._name, self._array, before, depends_on)
        cached = _read(key)
        if cached is not None:
            return cached
        computed = compute()
        # A change while computing may have mixed old and new content.
        if self._identity() != before or computed is None:
            return computed
        _keep(key, computed)
        cached = _read(key)
        return computed if cached is None else cached


class FileRecord:
    """Small tables computed from one file, cached together, to be read at once when it is reopened.

    Their key is that of `CachedTables`. They are read at the first `get`, and those that have been
    added are written by `save_records`.

    Parameters
    ----------
    name
        The file, absolute, or the URL.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tables = dict[str, NDArray[Any]]()  # by what they are of, and their own names
        self._read_for: LastingIdentity | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}, "_read_for": None}

    def get(
        self,
        what: str,
        compute: Callable[[], Computed],
        identity: Callable[[], LastingIdentity | None],
    ) -> Computed | Tables:
        """Return tables: recorded ones, or computed ones, which are added unless they are large.

        Parameters
        ----------
        what
            Names the tables and what they depend on besides the content of the file.
        compute, identity
            See `CachedTables`.
        """
        before = identity()
        if before is None or not before.is_settled:
            return compute()
        if self._read_for != before:
            key = _key(self._name, "", before, "record")
            self._tables, self._read_for = dict(_read(key, is_mapped=False) or {}), before
        begin = f"{what}{_END}"
        recorded = {
            name.removeprefix(begin): table
            for name, table in [*self._tables.items()]  # to which other threads may add
            if name.startswith(begin)
        }
        if recorded:
            return recorded
        found = compute()
        if identity() != before or found is None:
            return found
        if sum(table.nbytes for table in found.values()) <= _LARGEST_RECORDED:
            for table in found.values():
                table.flags.writeable = False
            self._tables |= {f"{begin}{name}": table for name, table in found.items()}
            _unsaved.add(self)
        return found

    def save(self) -> None:
        """Write all tables."""
        if self._read_for is not None:
            _keep(_key(self._name, "", self._read_for, "record"), self._tables.copy())


_LARGEST_RECORDED = 1 << 20  # bytes; what is larger is left to `CachedTables`, which maps it
_END = "\0"
_unsaved = weakref.WeakSet[FileRecord]()


def save_records() -> None:
    """Write the records of files to which tables have been added."""
    for record in list(_unsaved):
        _unsaved.discard(record)
        record.save()


def pack(value: Any) -> Tables:
    """Return a value of JSON as a table."""
    return {"json": np.frombuffer(json.dumps(value).encode(), np.uint8)}


def unpack(tables: Tables) -> Any:
    """Return the value of `pack`."""
    return json.loads(tables["json"].tobytes())


def are_many(n_entries: int) -> bool:
    """Return whether tables of this length are cached in a file of their own."""
    return n_entries >= _FEWEST_ENTRIES


def _key(name: str, array: str, identity: LastingIdentity, depends_on: str) -> bytes:
    facts = {
        "array": array,
        "byteorder": sys.byteorder,
        "cellfeed": __version__,
        "depends on": depends_on,
        "format": _FORMAT,
        "identity": identity.digest,
        "path": name,
    }
    return json.dumps(facts, sort_keys=True).encode()


_UNCACHED = (OSError, ValueError, TypeError, LookupError, RuntimeError, MemoryError)


def _path_of(key: bytes) -> Path:
    return cache_folder("tables") / f"{blake2b(key, digest_size=16).hexdigest()}{_SUFFIX}"


def _read(key: bytes, *, is_mapped: bool = True) -> Tables | None:
    """Return the cached tables of a key; None if there are none, or they cannot be read."""
    try:
        path = _path_of(key)
        with suppress(FileNotFoundError):
            content = map_or_read(path) if is_mapped else np.fromfile(path, np.uint8)
            content.flags.writeable = False
            found = _parsed(content, key)
            with suppress(OSError):
                os.utime(path)  # time of the last use
            return found
    except _UNCACHED as error:
        _log(error)
    return None


def _keep(key: bytes, tables: Tables) -> None:
    """Cache the tables of a key, if that is possible."""
    try:
        _write_file(_path_of(key), key, tables)
    except _UNCACHED as error:
        _log(error)


def _log(error: Exception) -> None:
    _logger.info("tables cannot be cached for later openings: %s", error)


def _write_file(path: Path, key: bytes, tables: Tables) -> None:
    """Write a file, unless the folder is full of tables in use."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    parts = _encoded(key, tables)
    if not _make_room(path.parent, sum(map(len, parts))):
        return
    descriptor, unfinished = tempfile.mkstemp(suffix=_UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


_room = dict[Path, int]()  # bytes that may be written before a folder is listed again


def _make_room(folder: Path, n_bytes: int) -> bool:
    """Remove files until there is room for another; return whether there is."""
    if n_bytes <= _room.get(folder, 0):
        _room[folder] -= n_bytes
        return True
    found = list[tuple[float, int, Path]]()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may remove files concurrently
            if path.suffix in {_SUFFIX, _UNFINISHED}:
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
    taken, now = sum(size for _, size, _ in found), time.time()
    for used, size, path in sorted(found):
        if taken + n_bytes <= _MOST_BYTES or now - used < _IN_USE_SECONDS:
            break
        path.unlink(missing_ok=True)
        taken -= size
    # Other processes write, too, so not all that is left.
    _room[folder] = min(_MOST_BYTES - taken - n_bytes, _MOST_BYTES // 100)
    return taken + n_bytes <= _MOST_BYTES


# Memory-mapping files that do not change, so that processes share their memory.

_SHARE_OF_OPEN_FILES = 8  # of what the process may still open; a mapping holds one

# Where a file that another machine removes is gone for whoever has mapped it: a crash.
_NOT_MAPPED = {"9p", "afs", "cifs", "fuse.sshfs", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}

_mapped: list[weakref.ref[mmap.mmap]] = []


def map_or_read(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a file, read-only: mapped, or a copy if mapping is not safe.

    Raises
    ------
    OSError, ValueError
        The file cannot be read, or is empty.
    """
    with path.open("rb") as file:
        _mapped[:] = [each for each in _mapped if each() is not None]
        n_mapped = len(_mapped)
        has_room = n_mapped < share_of_descriptors(_SHARE_OF_OPEN_FILES, n_mapped)
        if not has_room or file_system(path.parent) in _NOT_MAPPED:
            content = np.fromfile(file, np.uint8)
            content.flags.writeable = False
            return content
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _mapped.append(weakref.ref(mapped))
    return np.frombuffer(mapped, np.uint8)


def file_system(path: Path) -> str:
    """Return the type of the file system of a file or folder, such as "ext4"; "" if unknown."""
    resolved = Path(os.path.realpath(path))
    mounted = [
        (len(each.mountpoint), each.fstype)
        for each in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(each.mountpoint)
    ]
    return max(mounted, default=(0, ""))[1]
