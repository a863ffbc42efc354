"""A folder of shards, local or on a server: their files and headers.

docs/how-to/tokens.md describes the format.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
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
    Version,
    digest_of,
    map_or_read,
    refuse_pipe,
    versions_below,
    versions_of,
)
from cellfeed.extending import CellfeedError, FormatError, ParameterError, PathError, os_errors
from cellfeed.sources import files_in

# The folder, on this machine, a web server or an object store: its files.

_PIECE_BYTES = 1 << 22
_MOST_OBJECTS = 1_000_000


class Folder:
    """A folder of this machine, a web server or an object store.

    Each answer of a server states the version of the object; versions other than the one that was
    first seen are refused.

    Parameters
    ----------
    location
        The folder.
    names
        Names of folders in it, where it cannot be listed: on a web server.

    Attributes
    ----------
    location
        The folder.
    names
        Names of what is in it, ascending.

    Raises
    ------
    PathError
        There is no such folder, or it cannot be listed.
    """

    def __init__(self, location: Location, names: Sequence[str] | None) -> None:
        self.location = location
        self._path = None if location.path is None else location.path.absolute()
        self._versions: dict[str, Version | None] = {}
        self._is_listed = True
        if self._path is not None:
            if not self._path.is_dir():
                raise PathError(f"{location.shown}: no such folder; check the path")
            try:
                self.names = sorted(os.listdir(self._path))  # noqa: PTH208 - only names
            except OSError as error:
                raise unreadable(location, error) from error
            return
        self.location = Location(location.text.rstrip("/"), location.options)
        listed = versions_below(self.location, _MOST_OBJECTS)
        if listed is not None:
            self._versions |= listed
            names = {*(name.partition("/")[0] for name in listed)}  # type: ignore[assignment]
        elif names is None:
            msg = f"{location}: its shards cannot be listed; name them, as in"
            raise PathError(f"{msg} cellfeed.TokenStream({location.text!r}, shards=['a', 'b'])")
        self._is_listed, self.names = listed is not None, sorted(names or ())

    def files(self, names: Sequence[str]) -> ByteStore:
        """Return files, numbered in this order."""
        if self._path is not None:
            return files_in(self._path, names)
        unknown = [] if self._is_listed else [each for each in names if each not in self._versions]
        if unknown:
            self._versions |= dict.fromkeys(unknown) | versions_of(self.location, unknown)
        versions = [*map(self._versions.get, names)]
        return RemoteObjects(partial(_below, self.location, names), versions.__getitem__)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the sizes of files in bytes, -1 for those that are missing."""
        sizes: list[int] = self.files(names).sizes(np.arange(len(names))).tolist()
        return sizes

    def contents(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small files."""
        if self._path is not None:
            return [bytes(self._local(name, Path.read_bytes)) for name in names]
        sizes = self.sizes(names)
        for name, size in zip(names, sizes, strict=True):
            if size < 0:
                raise PathError(f"{self.location / name}: no such object; check the URL")
        files = np.arange(len(names), dtype=np.int64)
        found = self.files(names).read_ranges(files, np.zeros_like(files), np.array(sizes))
        return [bytes(each) for each in map(self._whole, names, found, sizes)]

    def table(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a file: memory-mapped, read, or cached on this machine."""
        if self._path is not None:
            mapped: NDArray[np.uint8] = self._local(name, map_or_read)
            return mapped
        objects, (size,) = self.files([name]), self.sizes([name])

        def read() -> Mapping[str, NDArray[Any]]:
            firsts = np.arange(0, size, _PIECE_BYTES, dtype=np.int64)
            counts = np.minimum(firsts + _PIECE_BYTES, size) - firsts
            found = objects.read_ranges(np.zeros_like(firsts), firsts, counts)
            pieces = [*map(self._whole, [name] * firsts.size, found, counts.tolist())]
            return {"bytes": np.frombuffer(b"".join(pieces), np.uint8)}

        cached = CachedTables(str(self.location), name, objects.identity)
        return cached.get("bytes", size, read)["bytes"]

    def version(self) -> str | None:
        """Return a digest of the versions of all objects; None if one has none, or for files."""
        tags = {
            name: each.etag for name, each in sorted(self._versions.items()) if each is not None
        }
        return digest_of(repr(tags)) if tags and None not in tags.values() else None

    def _local(self, name: str, read: Callable[[Path], Any]) -> Any:
        """Read a file; refuse a pipe, since opening it would wait for ever."""
        path = Path(self._path or "", name)
        refuse_pipe(path)
        try:
            return read(path)
        except (OSError, ValueError) as error:
            raise unreadable(self.location / name, error) from error

    def _whole(self, name: str, found: Any, size: int) -> Any:
        if found is None or len(found) != size:
            raise FormatError(f"{self.location / name}: is shorter than expected; upload it again")
        return found


def _below(folder: Location, names: Sequence[str], number: int) -> Location:
    return folder / names[number]


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


# The header of a shard.

SUFFIX = ".tokens"  # name of a shard's folder
UNFINISHED = ".unfinished"  # name of an unfinished shard's folder, which begins with a dot
HEADER = "shard.json"
TOKENS, DOCUMENTS = "tokens.bin", "documents.bin"
INDEX, SPANS, METADATA = "index.bin", "spans.bin", "metadata.bin"
BLOCK = 4096  # default number of tokens in a block of spans

SPAN_RECORD = np.dtype(
    [
        ("start", "<i8"),
        ("stop", "<i8"),
        ("id", "<i8"),
        ("first_byte", "<i8"),
        ("n_bytes", "<i4"),
        ("began_before", "<u4"),
    ]
)
"""A span in a block: its tokens in the shard, its number in the shard, the bytes of its metadata in
`METADATA`, and whether it began in an earlier block, which contains it too."""

_FORMAT = "cellfeed token shard"
_VERSION = 1
_KINDS = "biuf"
_LARGEST_ITEM = 8  # size of a number in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """The header of a shard.

    Parameters
    ----------
    dtype
        Dtype of the tokens: as NumPy names it, or a list of fields with their dtypes.
    n_tokens, n_documents, longest_document, n_spans
        Counts, and the number of tokens of the longest document; ``n_documents`` is None if the
        shard has no documents.
    block
        Number of tokens in a block of spans.
    obs
        Categories of each attribute of documents, the first of which is in ``obs-0.bin``.
    files
        Size in bytes of each file.
    """

    dtype: Any
    n_tokens: int
    n_documents: int | None
    longest_document: int
    n_spans: int
    block: int
    obs: Mapping[str, list[str]]
    files: Mapping[str, int]


def require_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the stored form of a dtype: little-endian, without gaps between fields.

    Raises
    ------
    ParameterError
        It is neither numeric or boolean with at most 8 bytes, nor structured with such fields.
    """
    try:
        given = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        msg = f"`dtype` must be a NumPy dtype, such as 'uint16', but got {dtype!r}"
        raise ParameterError(msg) from error
    parts = {"": given} if given.names is None else {name: given[name] for name in given.names}
    for name, part in parts.items():
        base = part.base
        if base.kind not in _KINDS or base.itemsize > _LARGEST_ITEM or (part.shape and not name):
            msg = "`dtype` must be of integers, floats or booleans of at most 8 bytes, or of fields"
            raise ParameterError(f"{msg} of these, but got {given}; leave out other fields")
    little = {
        name: np.dtype((part.base.newbyteorder("<"), part.shape)) for name, part in parts.items()
    }
    return little[""] if given.names is None else np.dtype(list(little.items()))


def dtype_of(shown: Any) -> np.dtype[Any]:
    """Return the dtype in a header, which `numpy.lib.format.dtype_to_descr` wrote there.

    Raises
    ------
    ParameterError, TypeError, ValueError
        The dtype is invalid.
    """
    if isinstance(shown, str):
        return require_dtype(shown)
    return require_dtype([(str(name), str(base), *map(tuple, rest)) for name, base, *rest in shown])


def write_header(folder: Path, header: ShardHeader) -> Path:
    """Write the header of a shard, with its checksum; return the file."""
    fields = {"format": _FORMAT, "version": _VERSION, **asdict(header)}
    path = folder / HEADER
    path.write_text(json.dumps(fields | {"checksum": _checksum(fields)}, indent=1) + "\n")
    return path


def read_headers(folder: Folder, shards: Sequence[str]) -> list[ShardHeader]:
    """Read and check the headers of shards, and check the sizes of their files.

    Raises
    ------
    FormatError
        A header is damaged or of a later version, or a file has another size.
    PathError
        A header may not be read or is missing, or too many files are open.
    """
    names = [f"{shard}/{HEADER}" for shard in shards]
    contents = zip(names, folder.contents(names), strict=True)
    headers = [_header(folder.location / name, content) for name, content in contents]
    expected = {
        f"{shard}/{name}": n_bytes
        for shard, header in zip(shards, headers, strict=True)
        for name, n_bytes in header.files.items()
    }
    for (name, n_bytes), there in zip(expected.items(), folder.sizes([*expected]), strict=True):
        where = folder.location / name
        if there < 0:
            raise FormatError(f"{where}: is missing; write or copy the shard again")
        if there != n_bytes:
            msg = f"{where}: has {there:,} bytes, but {n_bytes:,} were written"
            raise FormatError(f"{msg}; copy the shard again")
    return headers


def _header(where: Location, content: bytes) -> ShardHeader:
    try:
        fields = json.loads(content)
        checksum = fields.pop("checksum")
        found, version = fields.pop("format"), fields.pop("version")
        is_whole = checksum == _checksum({"format": found, "version": version, **fields})
    except (ValueError, LookupError, AttributeError) as error:
        raise damaged(where, f"cannot be read ({type(error).__name__})") from error
    if found == _FORMAT and isinstance(version, int) and version > _VERSION:
        msg = f"{where}: is of version {version}, but this cellfeed reads {_VERSION}"
        raise FormatError(f"{msg}; update cellfeed")
    if not is_whole or found != _FORMAT or version != _VERSION:
        raise damaged(where, "its checksum is wrong")
    return ShardHeader(**fields)


def _checksum(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return digest_of(text)


_BUFFER_BYTES = 1 << 20


class WrittenFile:
    """A file that is written sequentially.

    Parameters
    ----------
    path
        Path of the file, which must not exist.

    Attributes
    ----------
    n_bytes
        Size of what was written so far.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.n_bytes = path, 0
        self._file = path.open("xb", _BUFFER_BYTES)

    def write(self, data: bytes | NDArray[Any]) -> None:
        """Write bytes, or the elements of a contiguous array."""
        buffer = data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
        with os_errors(self.path):
            self._file.write(buffer)
        self.n_bytes += len(buffer)

    def discard(self) -> None:
        """Close the file; bytes that cannot be written are lost."""
        with suppress(OSError):
            self._file.close()

    def close(self) -> None:
        """Close the file once all bytes are on disk."""
        with os_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


# The shards of a folder, opened together.


class Shards:
    """All finished shards of a folder, or some of them, by name.

    Parameters
    ----------
    location
        The folder.
    shards
        Names of the shards to read; all of them if None, which requires a folder that can be
        listed.

    Attributes
    ----------
    names
        Names of the folders of the shards.
    are_some
        Whether the folder is known to have others.
    headers
        Headers of the shards.
    dtype
        Dtype of the tokens, the same in all shards.
    bounds
        Where each shard begins in the stream, in tokens, int64, shape (n_shards + 1,).

    Raises
    ------
    PathError
        There is no such folder or shard, it may not be read or listed, or too many files are open.
    FormatError
        It has no finished shard, a shard is damaged, or the shards have different dtypes.
    RemoteError
        A server cannot be reached, or refuses the request.

    Warns
    -----
    UserWarning
        Some shards are unfinished.
    """

    def __init__(self, location: Location, shards: Sequence[str] | None = None) -> None:
        wanted = None if shards is None else [f"{shard}{SUFFIX}" for shard in shards]
        self._folder = Folder(location, wanted)
        self.location, names = self._folder.location, self._folder.names
        found = [name for name in names if name.endswith(SUFFIX)]
        unfinished = [each for each in names if each[0] == "." and each.endswith(UNFINISHED)]
        n_there = len(found)
        if wanted is not None:
            for name in wanted:
                if name not in found:
                    msg = f"{self.location}: has no finished shard {name.removesuffix(SUFFIX)!r}"
                    raise PathError(f"{msg}; check `shards`")
            found = sorted(wanted)
        elif unfinished:
            n, some = len(unfinished), ", ".join(unfinished[:3])
            msg = f"{self.location}: {n} unfinished shards are left out ({some}); finish or remove"
            warnings.warn(f"{msg} them", UserWarning, stacklevel=3)
        if not found:
            msg = f"{self.location}: has no finished shard; write one with `TokenStreamWriter`"
            raise FormatError(msg)
        self.names, self.are_some = found, len(found) < n_there
        self.headers = read_headers(self._folder, found)
        self.dtype = self._dtype_of(0)
        for shard, name in enumerate(found):
            if self._dtype_of(shard) != self.dtype:
                msg = (
                    f"{self.location / name}: has tokens of {self._dtype_of(shard)}, but "
                    f"{found[0]} of {self.dtype}; keep shards of different dtypes in different "
                    "folders"
                )
                raise FormatError(msg)
        sizes = [header.n_tokens for header in self.headers]
        self.bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all shards."""
        return int(self.bounds[-1])

    def version(self) -> str | None:
        """Return a digest that changes when an object on a server is replaced; else None."""
        return self._folder.version()

    def files(self, name: str) -> ByteStore:
        """Return the files with one name, by shard number."""
        return self._folder.files([f"{shard}/{name}" for shard in self.names])

    def table(self, name: str) -> ShardTables:
        """Return the file of each shard as int64, read when it is used."""
        return ShardTables(self._folder, [f"{shard}/{name}" for shard in self.names])

    def damaged(self, shard: int, name: str, what: str) -> FormatError:
        """Return the error for a file with invalid contents."""
        return damaged(self.location / self.names[shard] / name, what)

    def _dtype_of(self, shard: int) -> np.dtype[Any]:
        try:
            return dtype_of(self.headers[shard].dtype)
        except (TypeError, ValueError) as error:
            msg = f"{self.location / self.names[shard]}: has tokens of an unknown dtype ({error})"
            raise FormatError(f"{msg}; update cellfeed") from error


class ShardTables:
    """A table of int64 per shard: in each process, mapped or read when it is first used.

    Parameters
    ----------
    folder, names
        The files.
    """

    def __init__(self, folder: Folder, names: Sequence[str]) -> None:
        self._folder, self._names = folder, names
        self._tables = dict[int, NDArray[np.int64]]()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}

    def of(self, shard: int) -> NDArray[np.int64]:
        """Return the table of one shard."""
        if shard not in self._tables:
            name = self._names[shard]
            content = self._folder.table(name)
            try:
                self._tables[shard] = content.view("<i8")
            except ValueError as error:
                raise unreadable(self._folder.location / name, error) from error
        return self._tables[shard]

    def load(self, shards: Iterable[int]) -> None:
        """Read the tables of shards."""
        for shard in shards:
            self.of(shard)

    def at(self, shards: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return one value of the table of each given shard; shards may repeat."""
        out = np.zeros(places.size, np.int64)
        for shard in np.unique(shards).tolist():
            own = shards == shard
            out[own] = self.of(shard)[places[own]]
        return out
