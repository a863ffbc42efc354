"""A folder of shards, local or on a server: their files and headers.

docs/how-to/tokens.md describes the format.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
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
from cellfeed.extending import FormatError, ParameterError, PathError, one_line
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

    def __init__(self, location: Location, names: Iterable[str] | None) -> None:
        self.location = location
        self._path = None if location.path is None else location.path.absolute()
        self._versions, self._is_listed = dict[str, Version](), True
        if self._path is not None:
            if not self._path.is_dir():
                raise PathError(f"{location.shown}: no such folder; check the path")
            self.names = sorted(self._local("", os.listdir))
            return
        self.location = Location(location.text.rstrip("/"), location.options)
        listed = versions_below(self.location, _MOST_OBJECTS)
        self._is_listed = listed is not None
        if listed is not None:
            self._versions, names = listed, {name.partition("/")[0] for name in listed}
        elif names is None:
            msg = f"{location}: its shards cannot be listed; name them, as in"
            raise PathError(f"{msg} cellfeed.TokenStream({location.text!r}, shards=['a', 'b'])")
        self.names = sorted(names)

    def files(self, names: Sequence[str]) -> ByteStore:
        """Return files, numbered in this order."""
        if self._path is not None:
            return files_in(self._path, names)
        locations = [self.location / name for name in names]
        versions = [*map(self._versions.get, names)]
        return RemoteObjects(locations.__getitem__, versions.__getitem__)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the sizes of files in bytes, -1 for those that are missing."""
        if not self._is_listed:
            self._versions |= versions_of(self.location, names)
        sizes: list[int] = self.files(names).sizes(np.arange(len(names))).tolist()
        return sizes

    def contents(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small files."""
        if self._path is not None:
            return [self._local(name, Path.read_bytes) for name in names]
        sizes = self.sizes(names)
        for name, size in zip(names, sizes, strict=True):
            if size < 0:
                raise PathError(f"{self.location / name}: no such object; check the URL")
        files = np.arange(len(names), dtype=np.int64)
        found: Any = self.files(names).read_ranges(files, np.zeros_like(files), np.array(sizes))
        return [*map(bytes, found)]

    def table(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a file: memory-mapped, read, or cached on this machine."""
        if self._path is not None:
            mapped: NDArray[np.uint8] = self._local(name, map_or_read)
            return mapped
        objects = self.files([name])
        size = int(objects.sizes(np.zeros(1, np.int64))[0])

        def read() -> Mapping[str, NDArray[Any]]:
            firsts = np.arange(0, size, _PIECE_BYTES, dtype=np.int64)
            counts = np.minimum(size - firsts, _PIECE_BYTES)
            pieces: Any = objects.read_ranges(np.zeros_like(firsts), firsts, counts)
            return {"bytes": np.frombuffer(b"".join(pieces), np.uint8)}

        cached = CachedTables(str(self.location), name, objects.identity)
        return cached.get("bytes", size, read)["bytes"]

    def version(self) -> str | None:
        """Return a digest of the versions of all objects; None if one has none, or for files."""
        tags = {name: each.etag for name, each in sorted(self._versions.items())}
        return digest_of(repr(tags)) if tags and None not in tags.values() else None

    def _local(self, name: str, read: Callable[[Path], Any]) -> Any:
        """Read a file or folder; refuse a pipe, since opening it would wait for ever."""
        path, where = Path(self._path or "", name), self.location / name
        refuse_pipe(path)
        try:
            return read(path)
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None)
            if number in _REMEDIES:
                raise PathError(f"{where}: {_REMEDIES[number]}") from error
            raise damaged(where, f"cannot be read ({error})") from error


_REMEDIES = {
    errno.EMFILE: "too many files are open; allow more, for example with `ulimit -n 65536`",
    errno.EACCES: "permission to read is denied; check its permissions",
}


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
        Dtype of the tokens.
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

    dtype: np.dtype[Any]
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
    fields = [given] if given.names is None else [given[name] for name in given.names]
    bases = [each.base for each in fields]
    are_numbers = all(each.kind in _KINDS and each.itemsize <= _LARGEST_ITEM for each in bases)
    if not (fields and are_numbers) or given.shape:
        msg = "`dtype` must be of integers, floats or booleans of at most 8 bytes, or of fields"
        raise ParameterError(f"{msg} of these, but got {given}; leave out other fields")
    little = [each.newbyteorder("<") for each in fields]
    return little[0] if given.names is None else np.dtype([*zip(given.names, little, strict=True)])


def encoded_header(header: ShardHeader) -> bytes:
    """Return the header of a shard as JSON, with its checksum."""
    described = {"dtype": npy.dtype_to_descr(header.dtype)}
    fields = {"format": _FORMAT, "version": _VERSION, **asdict(header), **described}
    return f"{json.dumps(fields | {'checksum': _checksum(fields)}, indent=1)}\n".encode()


def read_headers(folder: Folder, shards: Sequence[str]) -> list[ShardHeader]:
    """Read and check the headers of shards, and check the sizes of their files.

    Raises
    ------
    FormatError
        A header is damaged or of another version, or a file has another size.
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
        if there != n_bytes:
            what = f"has {there:,} bytes, but {n_bytes:,} were written"
            raise damaged(folder.location / name, what if there >= 0 else "is missing")
    return headers


def _header(where: Location, content: bytes) -> ShardHeader:
    try:
        fields = json.loads(content)
        checksum = fields.pop("checksum")
        is_whole = checksum == _checksum(fields)
        kind, version = fields.pop("format"), fields.pop("version")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise damaged(where, f"cannot be read ({type(error).__name__})") from error
    if version == _VERSION and not (is_whole and kind == _FORMAT):
        raise damaged(where, "its checksum is wrong")
    why = f"version {version}, not {_VERSION}"
    if version == _VERSION:
        try:
            fields["dtype"] = require_dtype(npy.descr_to_dtype(fields["dtype"]))
            return ShardHeader(**fields)
        except (TypeError, ValueError, LookupError) as error:
            why = one_line(error)
    msg = f"{where}: was written by another version of cellfeed ({why})"
    raise FormatError(f"{msg}; write the shard again, or update cellfeed")


def _checksum(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return digest_of(text)


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
    folder, location
        The folder, and where it is.
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
    n_tokens
        Number of tokens in all shards.

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
        self.folder = Folder(location, wanted)
        self.location, names = self.folder.location, self.folder.names
        found = [name for name in names if name.endswith(SUFFIX)]
        unfinished = [each for each in names if each[0] == "." and each.endswith(UNFINISHED)]
        n_there = len(found)
        if wanted is not None:
            for name in wanted:
                if name not in found:
                    msg = f"{self.location}: has no finished shard {name.removesuffix(SUFFIX)!r}"
                    raise PathError(f"{msg}; check `shards`")
            found = sorted({*wanted})
        elif unfinished:
            n, some = len(unfinished), ", ".join(unfinished[:3])
            msg = f"{self.location}: {n} unfinished shards are left out ({some}); finish or remove"
            warnings.warn(f"{msg} them", UserWarning, stacklevel=3)
        if not found:
            msg = f"{self.location}: has no finished shard; write one with `TokenStreamWriter`"
            raise FormatError(msg)
        self.names, self.are_some = found, len(found) < n_there
        self.headers = read_headers(self.folder, found)
        self.dtype = self.headers[0].dtype
        for name, header in zip(found, self.headers, strict=True):
            if header.dtype != self.dtype:
                msg = f"{self.location / name}: has tokens of {header.dtype}, but {found[0]} of"
                msg = f"{msg} {self.dtype}; keep shards of different dtypes in different folders"
                raise FormatError(msg)
        sizes = [header.n_tokens for header in self.headers]
        self.bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.n_tokens = int(self.bounds[-1])
        self._tables = dict[tuple[str, int], NDArray[np.int64]]()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}

    def files(self, name: str) -> ByteStore:
        """Return the files with one name, by shard number."""
        return self.folder.files([f"{shard}/{name}" for shard in self.names])

    def table(self, name: str, shard: int) -> NDArray[np.int64]:
        """Return a file of a shard as int64, which each process maps or reads when it needs it."""
        if (name, shard) not in self._tables:
            content, header = self.folder.table(f"{self.names[shard]}/{name}"), self.headers[shard]
            n_documents = header.n_documents or 0
            n_entries = {DOCUMENTS: n_documents + 1, INDEX: -(-header.n_tokens // header.block) + 1}
            if content.size != 8 * n_entries.get(name, n_documents):
                raise self.damaged(shard, name, "has another number of entries than its header")
            self._tables[name, shard] = content.view("<i8")
        return self._tables[name, shard]

    def entries(
        self, name: str, shards: NDArray[np.int64], places: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return one entry of the table of each given shard; shards may repeat."""
        out = np.zeros(places.size, np.int64)
        for shard in np.unique(shards).tolist():
            own = shards == shard
            out[own] = self.table(name, shard)[places[own]]
        return out

    def damaged(self, shard: int, name: str, what: str) -> FormatError:
        """Return the error for a file with invalid contents."""
        return damaged(self.location / self.names[shard] / name, what)
