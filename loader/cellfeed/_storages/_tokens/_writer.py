"""Writing a shard of a token stream."""

import json
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import ParameterError, PathError, require_positive
from cellfeed._runs import expand
from cellfeed._storages._tokens._format import (
    BLOCK,
    DOCUMENTS,
    INDEX,
    METADATA,
    SPAN_RECORD,
    SPANS,
    SUFFIX,
    TOKENS,
    UNFINISHED,
    ShardHeader,
    ShardObs,
    WrittenFile,
    require_dtype,
    require_name,
    shown_dtype,
    sync_folder,
    write_header,
)

# Spans by blocks of tokens, so that the spans of a window are contiguous.
#
# A block lists the spans that overlap it: those that began before it, and those that begin in it.
# Their metadata has the same order. So a window needs one range of records and one range of
# metadata, however long the spans that reach into it, and an index with two numbers per block
# locates these ranges.

ADDED = np.dtype([("start", "<i8"), ("stop", "<i8"), ("first_byte", "<i8"), ("n_bytes", "<i8")])
"""A span in the order of addition, and the position of its metadata."""

_PAIRS_AT_ONCE = 1 << 18
_BYTES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansToWrite:
    """Spans of a shard in the order in which they were added.

    Parameters
    ----------
    spans, metadata
        Files of `ADDED`, and of the bytes of the spans' metadata.
    n_tokens, block
        Number of tokens of the shard, and of a block.
    """

    spans: Path
    metadata: Path
    n_tokens: int
    block: int

    def write(self, index: WrittenFile, records: WrittenFile, metadata: WrittenFile) -> None:
        """Write the spans by block."""
        added = np.fromfile(self.spans, ADDED)
        spans, blocks = self._pairs(added)
        n_blocks = -(-self.n_tokens // self.block)
        ends = np.concatenate([[0], np.cumsum(added["n_bytes"][spans])])
        firsts = np.searchsorted(blocks, np.arange(n_blocks + 1))
        index.write(np.stack([firsts, ends[firsts]], axis=1).astype("<i8"))
        for first in range(0, spans.size, _PAIRS_AT_ONCE):
            some = slice(first, first + _PAIRS_AT_ONCE)
            records.write(self._records(added, spans[some], blocks[some], ends[:-1][some]))
        stored = np.memmap(self.metadata, np.uint8) if self.metadata.stat().st_size else b""
        _copy(added, spans, ends, stored, metadata.write)

    def _pairs(self, added: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each span with each block that it overlaps, sorted by block and start."""
        order = np.argsort(added["start"], kind="stable")
        first = added["start"][order] // self.block
        stop = (added["stop"][order] - 1) // self.block + 1
        blocks = expand(np.stack([first, stop], axis=1))
        by_block = np.argsort(blocks, kind="stable")
        return np.repeat(order, stop - first)[by_block], blocks[by_block]

    def _records(
        self,
        added: NDArray[Any],
        spans: NDArray[np.int64],
        blocks: NDArray[np.int64],
        first_bytes: NDArray[np.int64],
    ) -> NDArray[Any]:
        records = np.zeros(spans.size, SPAN_RECORD)
        for name in ("start", "stop", "n_bytes"):
            records[name] = added[name][spans]
        records["id"], records["first_byte"] = spans, first_bytes
        records["began_before"] = records["start"] < blocks * self.block
        return records


def _copy(
    added: NDArray[Any],
    spans: NDArray[np.int64],
    ends: NDArray[np.int64],
    stored: Any,
    write: Callable[[NDArray[np.uint8]], None],
) -> None:
    """Copy the metadata of spans, a limited number of bytes at a time."""
    first = 0
    while first < spans.size:
        stop = int(np.searchsorted(ends, ends[first] + _BYTES_AT_ONCE))
        stop = min(max(stop, first + 1), spans.size)
        some = added[spans[first:stop]]
        runs = np.stack([some["first_byte"], some["first_byte"] + some["n_bytes"]], axis=1)
        if ends[stop] > ends[first]:
            write(stored[expand(runs)])
        first = stop


# Attributes of documents, written while documents are appended.


class DocumentObs:
    """Columns with one value per document: codes of text, or numbers.

    Parameters
    ----------
    folder
        Folder of the files.
    kinds
        Names of the columns, and ``str`` or ``float``.
    """

    def __init__(self, folder: Path, kinds: Mapping[str, type]) -> None:
        self._columns = {
            name: _Column(name, kind, WrittenFile(folder / f"obs-{number}.bin"))
            for number, (name, kind) in enumerate(kinds.items())
        }

    @property
    def files(self) -> list[WrittenFile]:
        """The file of each column."""
        return [each.file for each in self._columns.values()]

    def append(self, values: Mapping[str, str | float | None]) -> None:
        """Append the attributes of a document; omitted attributes are missing values.

        Raises
        ------
        ParameterError
            There is no such column, or it has values of the other kind.
        """
        for name in values:
            if name not in self._columns:
                there = ", ".join(map(repr, self._columns)) or "none"
                msg = f"`obs` of a document names {name!r}, but the writer's `obs` are: {there}"
                raise ParameterError(msg)
        encoded = [each.encoded(values.get(name)) for name, each in self._columns.items()]
        for file, value in zip(self.files, encoded, strict=True):
            file.write(value)

    def described(self) -> dict[str, ShardObs]:
        """Return the descriptions of the columns for the header."""
        return {
            name: ShardObs(
                file=each.file.name,
                categories=list(each.categories) if each.kind is str else None,
            )
            for name, each in self._columns.items()
        }


def require_kinds(kinds: Mapping[str, type], *, has_documents: bool) -> None:
    """Check that columns are of text or numbers, and that the shard has documents if any are given.

    Raises
    ------
    ParameterError
        A column has another kind, or there are no documents.
    """
    if kinds and not has_documents:
        msg = "`obs` requires documents; give `documents=True` as well"
        raise ParameterError(msg)
    for name, kind in kinds.items():
        if kind not in (str, float):
            msg = f"`obs` must give str or float for each column, but got {kind!r} for {name!r}"
            raise ParameterError(msg)


class _Column:
    def __init__(self, name: str, kind: type, file: WrittenFile) -> None:
        self._name, self.kind, self.file = name, kind, file
        self.categories = dict[str, int]()

    def encoded(self, value: str | float | None) -> bytes:
        """Return the 8 bytes of a value: a number, or the number of a category."""
        if value is None:
            return _MISSING
        if isinstance(value, str) and self.kind is str:
            return struct.pack("<q", self.categories.setdefault(value, len(self.categories)))
        if self.kind is float and not isinstance(value, str):
            return struct.pack("<d", float(value))
        msg = f"`obs` {self._name!r} must be {self.kind.__name__} or None, but got {value!r}"
        raise ParameterError(msg)


_MISSING = struct.pack("<q", -1)  # all bits set, which is NaN as float64


_MOST_METADATA = 1 << 20  # bytes of a span's metadata, since each overlapping block repeats it


class TokenStreamWriter:
    """Write one shard of a token stream; a context manager that finishes the shard at its exit.

    Any number of processes may write shards to the same folder independently. A shard becomes
    visible only when it is finished. If an exception leaves the block, the shard is removed; a
    process that is killed leaves a hidden folder, which is not read.

    Parameters
    ----------
    folder
        Folder of the stream, created if needed.
    dtype
        Dtype of a token: numeric, or structured with numeric fields if tokens have several values.
    shard
        Name of the shard; shards are read in the order of their names. A random name if None.
    documents
        Whether each call of `append` is a document.
    obs
        Attributes of documents, which become obs columns: a mapping from names to ``str`` or
        ``float``.
    encoder
        Function from the metadata of a span to bytes; ``json.dumps`` if None. Give the matching
        decoder to `TokenStream`.
    encoding
        Name of the encoding, stored for readers; required with an ``encoder``.
    block
        Number of tokens in a block of spans. A span is stored in each block that it overlaps, with
        its metadata.

    Raises
    ------
    ParameterError
        The dtype or the name is invalid, or a shard of this name exists.
    PathError
        The folder cannot be written to.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with TokenStreamWriter(folder, "uint16", documents=True) as writer:
    ...     writer.append([5, 3, 8], metadata={"title": "one"})
    ...     writer.append([1, 2], spans=[(1, 2, {"gene": "TP53"})])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        dtype: Any,
        *,
        shard: str | None = None,
        documents: bool = False,
        obs: Mapping[str, type] = MappingProxyType({}),
        encoder: Callable[[Any], bytes] | None = None,
        encoding: str | None = None,
        block: int = BLOCK,
    ) -> None:
        if (encoder is None) != (encoding is None):
            msg = (
                "`encoder` and `encoding` must be given together; give the encoding's name, such "
                "as 'msgpack'"
            )
            raise ParameterError(msg)
        require_kinds(obs, has_documents=documents)
        self._dtype = require_dtype(dtype)
        self._encoder = _as_json if encoder is None else encoder
        self._encoding = encoding or "json"
        self._block = require_positive("block", block)
        name = require_name(uuid.uuid4().hex if shard is None else shard)
        self._finished = Path(folder) / f"{name}{SUFFIX}"
        self._folder = Path(folder) / f".{name}{UNFINISHED}"
        self._n_tokens = self._n_documents = self._longest = self._n_spans = self._n_metadata = 0
        self._make_folder(name)
        try:
            self._tokens = self._new(TOKENS)
            self._documents = self._new(DOCUMENTS) if documents else None
            self._spans, self._metadata = self._new("added-spans"), self._new("added-metadata")
            self._obs = DocumentObs(self._folder, obs)
            if self._documents is not None:
                self._documents.write(np.zeros(1, "<i8"))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    @property
    def n_tokens(self) -> int:
        """Number of tokens appended so far."""
        return self._n_tokens

    def append(
        self,
        tokens: ArrayLike,
        *,
        metadata: Any = None,
        spans: Iterable[tuple[int, int, Any]] = (),
        obs: Mapping[str, str | float | None] = MappingProxyType({}),
    ) -> None:
        """Append tokens to the stream, as one document if the shard has documents.

        Parameters
        ----------
        tokens
            Tokens, shape (n,), of the shard's dtype or of one that NumPy casts to it without loss
            of kind.
        metadata
            Metadata of a span over all these tokens; no such span if None.
        spans
            Start, stop and metadata of spans, relative to the first of these tokens.
        obs
            Attributes of the document by name; omitted attributes, and None, are missing values.

        Raises
        ------
        ParameterError
            The tokens, a span or an attribute is invalid.
        """
        values = self._as_tokens(tokens)
        first, n = self._n_tokens, len(values)
        if metadata is not None and n:
            spans = [(0, n, metadata), *spans]
        encoded = [self._span(start, stop, each, n) for start, stop, each in spans]
        self._obs.append(obs)  # nothing is written before everything is validated
        if self._documents is not None:
            self._n_documents += 1
            self._longest = max(self._longest, n)
            self._documents.write(np.array([first + n], "<i8"))
        self._tokens.write(values)
        self._n_tokens += n
        for start, stop, each in encoded:
            self._write_span(first + start, first + stop, each)

    def add_span(self, start: int, stop: int, metadata: Any) -> None:
        """Add a span over tokens that were appended earlier.

        Parameters
        ----------
        start, stop
            First token, and the one after the last, relative to the first token of the shard.
        metadata
            Metadata of the span, as the encoder takes it.

        Raises
        ------
        ParameterError
            There are no such tokens, or the metadata cannot be encoded or takes more than 1 MiB.
        """
        self._write_span(*self._span(start, stop, metadata, self._n_tokens))

    def _span(self, start: int, stop: int, metadata: Any, n: int) -> tuple[int, int, bytes]:
        """Return a span of ``n`` tokens, with checked bounds and encoded metadata."""
        if not 0 <= start < stop <= n:
            msg = f"a span must have 0 <= start < stop <= {n}, but got ({start}, {stop})"
            raise ParameterError(msg)
        return int(start), int(stop), self._encoded(metadata)

    def _write_span(self, start: int, stop: int, encoded: bytes) -> None:
        self._spans.write(np.array([(start, stop, self._n_metadata, len(encoded))], ADDED))
        self._metadata.write(encoded)
        self._n_spans += 1
        self._n_metadata += len(encoded)

    def finish(self) -> None:
        """Make the shard visible, after all of it is on disk; if that fails, it is removed.

        Raises
        ------
        OSError
            The disk is full, for example.
        """
        try:
            self._finish()
        except BaseException:
            self.discard()
            raise

    def _finish(self) -> None:
        files = [self._tokens, *([self._documents] if self._documents else []), *self._obs.files]
        self._spans.close()
        self._metadata.close()
        if self._n_spans:
            by_block = [self._new(name) for name in (INDEX, SPANS, METADATA)]
            SpansToWrite(
                spans=self._folder / self._spans.name,
                metadata=self._folder / self._metadata.name,
                n_tokens=self._n_tokens,
                block=self._block,
            ).write(*by_block)
            files += by_block
        for each in (self._spans, self._metadata):
            (self._folder / each.name).unlink()
        for each in files:
            each.close(synced=True)
        header = write_header(
            self._folder,
            ShardHeader(
                dtype=shown_dtype(self._dtype),
                n_tokens=self._n_tokens,
                n_documents=None if self._documents is None else self._n_documents,
                longest_document=self._longest,
                n_spans=self._n_spans,
                block=self._block,
                encoding=self._encoding,
                obs=self._obs.described(),
                files={each.name: (each.n_bytes, each.crc32) for each in files},
            ),
        )
        with header.open("rb") as opened:
            os.fsync(opened.fileno())
        sync_folder(self._folder)
        self._folder.rename(self._finished)
        sync_folder(self._finished.parent)

    def discard(self) -> None:
        """Remove the unfinished shard."""
        for each in (self._tokens, self._documents, self._spans, self._metadata, *self._obs.files):
            if each is not None:
                each.discard()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self, name: str) -> None:
        if self._finished.exists():
            msg = f"{self._finished}: exists already; give another `shard` than {name!r}"
            raise ParameterError(msg)
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir()
        except FileExistsError as error:
            msg = (
                f"{self._folder}: is being written, or was left by a process that was killed; "
                "give another `shard`, or remove it"
            )
            raise ParameterError(msg) from error
        except OSError as error:
            msg = f"{self._folder}: cannot be created ({error.strerror}); check the path"
            raise PathError(msg) from error

    def _new(self, name: str) -> WrittenFile:
        return WrittenFile(self._folder / name)

    def _as_tokens(self, tokens: ArrayLike) -> NDArray[Any]:
        values = np.asarray(tokens)
        n_dimensions = values.ndim
        if not values.size and values.dtype != self._dtype:
            values = np.empty(0, self._dtype)
        if n_dimensions != 1 or not _can_hold(self._dtype, values):
            msg = (
                f"tokens must have one dimension and fit into {self._dtype}, but got shape "
                f"{values.shape} of {values.dtype}; cast them first"
            )
            raise ParameterError(msg)
        return values.astype(self._dtype)

    def _encoded(self, metadata: Any) -> bytes:
        try:
            encoded = bytes(self._encoder(metadata))
        except (TypeError, ValueError) as error:
            msg = f"metadata cannot be encoded as {self._encoding} ({error}); give an `encoder`"
            raise ParameterError(msg) from error
        if len(encoded) > _MOST_METADATA:
            msg = (
                f"metadata of a span takes {len(encoded):,} bytes, above 1 MiB; store it elsewhere"
            )
            raise ParameterError(msg)
        return encoded


def _as_json(metadata: Any) -> bytes:
    return json.dumps(metadata, separators=(",", ":"), allow_nan=False).encode()


def _can_hold(dtype: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Return whether a cast to this dtype keeps values, or only rounds them if both are floats."""
    if dtype.names is not None or values.dtype.names is not None:
        return bool(
            values.dtype.names == dtype.names and np.can_cast(values.dtype, dtype, "same_kind")
        )
    if np.can_cast(values.dtype, dtype, "safe") or values.dtype.kind == dtype.kind == "f":
        return True
    if values.dtype.kind not in "iu" or dtype.kind not in "iuf":
        return False
    return bool((values.astype(dtype).astype(values.dtype) == values).all())
