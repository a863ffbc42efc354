"""The files of a shard, and its header; docs/how-to/tokens.md describes the format."""

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import ByteStore, Location
from cellfeed.extending import FormatError, ParameterError, PathError
from cellfeed.storages.tokens._folder import (
    Folder,
    LocalFolder,
    RemoteFolder,
    damaged,
    unreadable,
)

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
"""A span in a block: its tokens in the shard, the number of its metadata in the shard, the bytes of
these in `METADATA`, and whether the span began in an earlier block, which contains it too."""

_FORMAT = "cellfeed token shard"
_VERSION = 1
_KINDS = "biuf"
_LARGEST_ITEM = 8  # size of a number in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardObs:
    """An attribute of documents: its file, and its categories; None if it is a number."""

    file: str
    categories: list[str] | None


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
    encoding
        Encoding of metadata, such as "json".
    obs
        Attributes of documents by name.
    files
        Size in bytes and CRC32 of each file.
    """

    dtype: str | list[list[Any]]
    n_tokens: int
    n_documents: int | None
    longest_document: int
    n_spans: int
    block: int
    encoding: str
    obs: Mapping[str, ShardObs]
    files: Mapping[str, tuple[int, int]]


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


def shown_dtype(dtype: np.dtype[Any]) -> str | list[list[Any]]:
    """Return a dtype in the form of the header."""
    if dtype.names is None:
        return dtype.str
    fields = ((name, dtype[name]) for name in dtype.names)
    return [[name, part.base.str, list(part.shape)] for name, part in fields]


def dtype_of(shown: Any) -> np.dtype[Any]:
    """Return the dtype in a header.

    Raises
    ------
    ParameterError, TypeError, ValueError
        The dtype is invalid.
    """
    if isinstance(shown, str):
        return require_dtype(shown)
    return require_dtype([(str(name), str(base), tuple(shape)) for name, base, shape in shown])


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
        for name, (n_bytes, _) in header.files.items()
    }
    for (name, n_bytes), there in zip(expected.items(), folder.sizes([*expected]), strict=True):
        where = folder.location / name
        if there is None:
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
    fields["obs"] = {name: ShardObs(**each) for name, each in fields["obs"].items()}
    return ShardHeader(**fields)


def _checksum(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# Files of a shard, written sequentially, with checksums.

_BUFFER_BYTES = 1 << 20


class WrittenFile:
    """A file that is written sequentially.

    Parameters
    ----------
    path
        Path of the file, which must not exist.

    Attributes
    ----------
    n_bytes, crc32
        Size and checksum of the bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = self.crc32 = 0
        self._file = path.open("xb", _BUFFER_BYTES)

    def write(self, data: bytes | NDArray[Any]) -> None:
        """Write bytes, or the elements of a contiguous array."""
        buffer = data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
        with self._named_errors():
            self._file.write(buffer)
        self.crc32 = zlib.crc32(buffer, self.crc32)
        self.n_bytes += len(buffer)

    def discard(self) -> None:
        """Close the file; bytes that cannot be written are lost."""
        with suppress(OSError):
            self._file.close()

    def close(self, *, synced: bool = False) -> None:
        """Close the file; if ``synced``, wait until all bytes are on disk."""
        with self._named_errors():
            if synced and not self._file.closed:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Add the path to errors of the system, such as a full disk."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        self._folder: Folder
        if location.path is None:
            self._folder = RemoteFolder(location, wanted)
        else:
            self._folder = LocalFolder(location)
        self.location = self._folder.location
        names = self._folder.names()
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

    def verify(self) -> None:
        """Compare all files with their checksums; see `TokenStream.verify`."""
        for shard, header in enumerate(self.headers):
            for name, (_, expected) in header.files.items():
                found = 0
                for piece in self._folder.pieces(f"{self.names[shard]}/{name}"):
                    found = zlib.crc32(piece, found)
                if found != expected:
                    raise self.damaged(shard, name, "its bytes have changed since it was written")

    def files(self, name: str) -> ByteStore:
        """Return the files with one name, by shard number."""
        return self._folder.files([f"{shard}/{name}" for shard in self.names])

    def table(self, name: str, dtype: Any) -> "ShardTables":
        """Return the file of each shard as a table with this dtype, read when it is used."""
        names = [f"{shard}/{name}" for shard in self.names]
        return ShardTables(self._folder, names, np.dtype(dtype))

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
    """One table per shard: in each process, mapped or read when it is first used.

    Parameters
    ----------
    folder, names, dtype
        The files, and the dtype of a row.
    """

    def __init__(self, folder: Folder, names: Sequence[str], dtype: np.dtype[Any]) -> None:
        self._folder, self._names, self._dtype = folder, names, dtype
        self._tables = dict[int, NDArray[Any]]()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}

    def of(self, shard: int) -> NDArray[Any]:
        """Return the table of one shard."""
        if shard not in self._tables:
            name = self._names[shard]
            content = self._folder.table(name)
            try:
                rows = content.view(self._dtype.base)
            except ValueError as error:
                raise unreadable(self._folder.location / name, error) from error
            self._tables[shard] = rows.reshape(-1, *self._dtype.shape)
        return self._tables[shard]

    def load(self) -> None:
        """Read the tables of all shards."""
        for shard in range(len(self._names)):
            self.of(shard)

    def rows(self, shards: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return one row of the table of each given shard; shards may repeat."""
        out = np.zeros((rows.size, *self._dtype.shape), self._dtype.base)
        order = np.argsort(shards, kind="stable")
        bounds = np.flatnonzero(np.diff(shards[order])) + 1
        for some in np.split(order, bounds) if order.size else ():
            out[some] = self.of(int(shards[some[0]]))[rows[some]]
        return out
