"""The files of a shard, and its header; docs/how-to/tokens.md describes the format."""

import errno
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

from cellfeed._bytes import Location
from cellfeed._decode import FolderFiles
from cellfeed._errors import CellfeedError, FormatError, ParameterError, PathError
from cellfeed._mapping import map_or_read
from cellfeed._storages._source import files_in

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


def read_header(folder: Path) -> ShardHeader:
    """Read and check the header of a shard, and check the sizes of its files.

    Raises
    ------
    FormatError
        The header is damaged or of a later version, or a file has another size.
    PathError
        The header may not be read, or too many files are open.
    """
    path = folder / HEADER
    try:
        fields = json.loads(path.read_bytes())
        checksum = fields.pop("checksum")
        found, version = fields.pop("format"), fields.pop("version")
        is_whole = checksum == _checksum({"format": found, "version": version, **fields})
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, LookupError, AttributeError) as error:
        raise _damaged(path, f"cannot be read ({type(error).__name__})") from error
    if found == _FORMAT and isinstance(version, int) and version > _VERSION:
        msg = f"{path}: is of version {version}, but this cellfeed reads {_VERSION}"
        raise FormatError(f"{msg}; update cellfeed")
    if not is_whole or found != _FORMAT or version != _VERSION:
        raise _damaged(path, "its checksum is wrong")
    fields["obs"] = {name: ShardObs(**each) for name, each in fields["obs"].items()}
    header = ShardHeader(**fields)
    for name, (n_bytes, _) in header.files.items():
        file = folder / name
        try:
            there = file.stat().st_size
        except OSError as error:
            raise FormatError(f"{file}: is missing; write or copy the shard again") from error
        if there != n_bytes:
            msg = f"{file}: has {there:,} bytes, but {n_bytes:,} were written"
            raise FormatError(f"{msg}; copy the shard again")
    return header


def unreadable(path: Path, error: Exception) -> CellfeedError:
    """Return the error for a file of a shard that could not be read, with the remedy."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        msg = f"{path}: too many files are open; allow more, for example with `ulimit -n 65536`"
        return PathError(msg)
    if isinstance(error, PermissionError):
        return PathError(f"{path}: permission to read is denied; check its permissions")
    return _damaged(path, f"cannot be read ({error})")


def _damaged(path: Path, what: str) -> FormatError:
    return FormatError(f"{path}: {what}; the shard is damaged, copy or write it again")


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

_PIECE_BYTES = 1 << 22


class Shards:
    """All finished shards of a folder, by name.

    Parameters
    ----------
    location
        The folder.

    Attributes
    ----------
    names
        Names of the shards.
    headers
        Headers of the shards.
    dtype
        Dtype of the tokens, the same in all shards.
    bounds
        Where each shard begins in the stream, in tokens, int64, shape (n_shards + 1,).

    Raises
    ------
    PathError
        There is no such folder, it may not be read, or too many files are open.
    FormatError
        It has no finished shard, a shard is damaged, or the shards have different dtypes.

    Warns
    -----
    UserWarning
        Some shards are unfinished.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        folder = location.path
        if folder is None or not folder.is_dir():
            raise PathError(f"{location.shown}: no such folder; check the path")
        self._folder = folder.absolute()
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 - only names
        except OSError as error:
            raise unreadable(folder, error) from error
        found = [name for name in names if name.endswith(SUFFIX)]
        unfinished = [each for each in names if each[0] == "." and each.endswith(UNFINISHED)]
        if unfinished:
            n, some = len(unfinished), ", ".join(unfinished[:3])
            msg = f"{folder}: {n} unfinished shards are left out ({some}); finish or remove them"
            warnings.warn(msg, UserWarning, stacklevel=3)
        if not found:
            msg = f"{folder}: has no finished shard; write one with `TokenStreamWriter`"
            raise FormatError(msg)
        self.names = found
        self.headers = [read_header(folder / name) for name in found]
        self.dtype = self._dtype_of(0)
        for shard, name in enumerate(found):
            if self._dtype_of(shard) != self.dtype:
                msg = (
                    f"{self._folder / name}: has tokens of {self._dtype_of(shard)}, but {found[0]} "
                    f"of {self.dtype}; keep shards of different dtypes in different folders"
                )
                raise FormatError(msg)
        sizes = [header.n_tokens for header in self.headers]
        self.bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all shards."""
        return int(self.bounds[-1])

    def verify(self) -> None:
        """Compare all files with their checksums; see `TokenStream.verify`."""
        for shard, header in enumerate(self.headers):
            for name, (_, expected) in header.files.items():
                found = 0
                with (self._folder / self.names[shard] / name).open("rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        found = zlib.crc32(piece, found)
                if found != expected:
                    raise self.damaged(shard, name, "its bytes have changed since it was written")

    def files(self, name: str) -> FolderFiles:
        """Return the files with one name, by shard number."""
        return files_in(self._folder, [f"{shard}/{name}" for shard in self.names])

    def table(self, name: str, dtype: Any) -> "ShardTables":
        """Return the file of each shard as a table with this dtype, mapped when it is used."""
        return ShardTables([self._folder / shard / name for shard in self.names], np.dtype(dtype))

    def damaged(self, shard: int, name: str, what: str) -> FormatError:
        """Return the error for a file with invalid contents."""
        where = self._folder / self.names[shard] / name
        return FormatError(f"{where}: {what}; the shard is damaged, copy it again")

    def _dtype_of(self, shard: int) -> np.dtype[Any]:
        try:
            return dtype_of(self.headers[shard].dtype)
        except (TypeError, ValueError) as error:
            msg = f"{self._folder / self.names[shard]}: has tokens of an unknown dtype ({error})"
            raise FormatError(f"{msg}; update cellfeed") from error


class ShardTables:
    """One table per shard, memory-mapped when it is first used, in each process separately.

    If too many files are mapped already, the file is read into memory.

    Parameters
    ----------
    paths, dtype
        The files, and the dtype of a row.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype[Any]) -> None:
        self._paths, self._dtype = paths, dtype
        self._mapped = dict[int, NDArray[Any]]()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}

    def of(self, shard: int) -> NDArray[Any]:
        """Return the table of one shard."""
        if shard not in self._mapped:
            path = self._paths[shard]
            try:
                rows = map_or_read(path).view(self._dtype.base)
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from error
            self._mapped[shard] = rows.reshape(-1, *self._dtype.shape)
        return self._mapped[shard]

    def rows(self, shards: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return one row of the table of each given shard; shards may repeat."""
        out = np.zeros((rows.size, *self._dtype.shape), self._dtype.base)
        order = np.argsort(shards, kind="stable")
        bounds = np.flatnonzero(np.diff(shards[order])) + 1
        for some in np.split(order, bounds) if order.size else ():
            out[some] = self.of(int(shards[some[0]]))[rows[some]]
        return out
