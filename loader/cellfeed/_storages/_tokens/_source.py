"""`TokenStream`: a folder of token shards, with windows or documents as rows."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._decode import FileExtents, RowRanges, SlowRead, can_cast
from cellfeed._errors import FormatError, ParameterError, require_positive
from cellfeed._lazy import pd
from cellfeed._rows import RaggedRows
from cellfeed._runs import Runs, expand
from cellfeed._storages._base import Source, Storage, StorageFacts, StoredElement, read_ragged
from cellfeed._storages._tokens._format import METADATA, SPANS, SUFFIX, TOKENS, UNFINISHED, Shards
from cellfeed._storages._tokens._spans import (
    SPAN,
    Documents,
    SpanReader,
    TokenRows,
    Windows,
    extents_of,
    require_rows,
)

# Obs columns of rows: the shard in which a row begins, and attributes of the document there.

SHARD = "shard"


class Labels:
    """Reads obs columns.

    Parameters
    ----------
    shards, rows
        The shards of the stream, and its rows.
    """

    def __init__(self, shards: Shards, rows: TokenRows) -> None:
        self._shards, self._rows = shards, rows

    def names(self) -> list[str]:
        """Return the columns: the shard, and the attributes that all shards have."""
        first, *others = (header.obs for header in self._shards.headers)
        return [SHARD, *(name for name in first if all(name in obs for obs in others))]

    def read(self, names: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read columns of ascending rows."""
        shards = self._rows.shards_of(rows)
        columns = dict[str, Any]()
        for name in names:
            if name == SHARD:
                named = [each.rpartition(".")[0] for each in self._shards.names]
                columns[name] = pd.Categorical.from_codes(shards, pd.Index(named, dtype=object))
            else:
                columns[name] = self._column(name, shards, rows)
        return pd.DataFrame(columns, index=pd.RangeIndex(rows.size))

    def _column(self, name: str, shards: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        described = [header.obs[name] for header in self._shards.headers]
        are_numbers = {each.categories is None for each in described}
        if len(are_numbers) > 1:
            msg = f"{self._shards.location}: obs {name!r} is text in some shards and numbers in"
            raise FormatError(f"{msg} others; write the same kind to all shards")
        is_number = are_numbers == {True}
        out: NDArray[Any] = np.empty(rows.size, np.float64 if is_number else np.int64)
        categories = dict[str, int]()
        bounds = np.searchsorted(shards, np.arange(len(described) + 1))
        for shard, each in enumerate(described):
            own = slice(bounds[shard], bounds[shard + 1])
            if own.start == own.stop:
                continue
            stored = self._shards.table(each.file, "<f8" if is_number else "<i8").of(shard)
            values = stored[self._rows.documents_of(shard, rows[own])]
            if not is_number:
                known = each.categories or []
                numbers = [categories.setdefault(text, len(categories)) for text in known]
                if values.size and not -1 <= values.min() <= values.max() < len(known):
                    raise self._shards.damaged(shard, each.file, "has codes without a category")
                values = np.array([*numbers, -1], np.int64)[values]
            out[own] = values
        if is_number:
            return out
        return pd.Categorical.from_codes(out, pd.Index(list(categories), dtype=object))


# The elements of a token stream: tokens, spans, and the metadata of spans.


class _Tokens(StoredElement):
    """Tokens of rows, read by compiled threads: one read for each shard in which a row lies."""

    var = None
    stored_as = TOKENS

    def __init__(self, shards: Shards, rows: TokenRows) -> None:
        self._shards, self._rows = shards, rows
        self.dtype = shards.dtype
        self._files = shards.files(TOKENS)

    def stored_bytes(self) -> int:
        """Return the size of all tokens in bytes."""
        return self._shards.n_tokens * self.dtype.itemsize

    def codec(self) -> str:
        """Return that nothing is compressed."""
        return "none"

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why values of this dtype are not decoded here; None if they are."""
        if can_cast(self.dtype, dtype):
            return None
        reason = f"cellfeed does not convert {self.dtype} to {dtype}"
        return SlowRead("NumPy", reason, f"read it as {self.dtype}, or write it as {dtype}")

    def _extents(self, rows: NDArray[np.int64]) -> FileExtents:
        return extents_of(self._shards.bounds, *self._rows.ranges(rows))

    def chunked(self) -> RowRanges:
        """Return where rows lie."""
        return RowRanges(
            name="tokens",
            shape=self.shape,
            dtype=self.dtype,
            files=self._files,
            extents=self._extents,
        )


class WindowTokens(_Tokens):
    """Windows of equal length.

    Parameters
    ----------
    shards, rows, window
        The shards of the stream, its windows, and the number of tokens of each.
    """

    layout = "dense"

    def __init__(self, shards: Shards, rows: Windows, window: int) -> None:
        super().__init__(shards, rows)
        self.shape = (rows.n_rows, window)

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Read windows, in this thread."""
        rows = read_ragged(self.chunked(), expand(runs))
        return rows.values.reshape(len(rows), self.shape[1])


class DocumentTokens(_Tokens):
    """Documents, of any length.

    Parameters
    ----------
    shards, rows
        The shards of the stream, and its documents.
    """

    layout = "ragged"

    def __init__(self, shards: Shards, rows: Documents) -> None:
        super().__init__(shards, rows)
        self.shape = (rows.n_rows,)

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of tokens of each document."""
        return self._rows.ranges(expand(runs))[1]

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read documents, in this thread."""
        return read_ragged(self.chunked(), expand(runs))


class SpansElement(StoredElement):
    """The spans that overlap each row, whose number is known only after they are read.

    Parameters
    ----------
    shards, rows, reader
        The shards of the stream, its rows, and the reader of spans.
    """

    layout = "ragged"
    var = None
    dtype: np.dtype[Any] = SPAN
    stored_as = SPANS

    def __init__(self, shards: Shards, rows: TokenRows, reader: SpanReader) -> None:
        self._shards, self._reader = shards, reader
        self.shape = (rows.n_rows,)

    def stored_bytes(self) -> int:
        """Return the size of all records in bytes."""
        sizes = (header.files.get(self.stored_as, (0, 0))[0] for header in self._shards.headers)
        return sum(sizes)

    def codec(self) -> str:
        """Return that nothing is compressed."""
        return "none"

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read the spans of rows."""
        return self._reader.spans(expand(runs))


class MetadataElement(SpansElement):
    """The metadata of the spans of each row, encoded and concatenated."""

    dtype = np.dtype(np.uint8)
    stored_as = METADATA

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read the metadata of the spans of rows."""
        return self._reader.metadata(expand(runs))


_DECODER = json.JSONDecoder()
_FIELDS = ("start", "stop", "shard", "id", "n_bytes")


@dataclass(frozen=True, slots=True)
class Span:
    """A range of tokens with metadata.

    Parameters
    ----------
    start, stop
        First token, and the one after the last, relative to the first token of the row. ``start``
        is negative if the span begins before the row, and ``stop`` is above the row's length if it
        continues after it.
    metadata
        The decoded metadata.
    shard, id
        Number of the shard, and of the span in the shard, which are the same in all rows that the
        span overlaps.
    """

    start: int
    stop: int
    metadata: Any
    shard: int
    id: int


class TokenStream(Source):
    """A stream of tokens in a folder, which `TokenStreamWriter` wrote.

    Pass it to `open_collection` in place of a path; for windows of 4,096 tokens, the path suffices.
    Rows are either windows of equal length, which may cross the borders of shards and documents,
    or documents.

    Parameters
    ----------
    folder
        Folder of the shards, which are read in the order of their names.
    window
        Number of tokens in a row. A shorter last window is left out.
    stride
        Number of tokens between the starts of consecutive rows; ``window`` if None.
    documents
        Whether rows are documents, of any length, in place of windows.
    decoder
        Function from the bytes of metadata to the objects that `spans` returns; ``json.loads`` if
        None. Only `spans` calls it, and nothing is ever unpickled.

    Attributes
    ----------
    elements
        ``"X"``, the tokens: shape (n_rows, window) for windows, `RaggedRows` for documents. If
        tokens have fields, the dtype is structured, and torch gets ``"X/FIELD"`` for each field.
        If there are spans: ``"spans"``, the spans that overlap each row, sorted by start, with the
        fields ``start``, ``stop``, ``shard``, ``id`` and ``n_bytes``; and ``"metadata"``, the
        concatenated bytes of their metadata.

    Raises
    ------
    PathError
        There is no such folder.
    FormatError
        The folder has no finished shard, a shard is damaged, or there is no window or document.
    ParameterError
        The window or the stride is below one.

    Warns
    -----
    UserWarning
        Some shards are unfinished and left out.

    Examples
    --------
    >>> import tempfile
    >>> from cellfeed import TokenStreamWriter, open_collection
    >>> folder = tempfile.mkdtemp()
    >>> with TokenStreamWriter(folder, "uint16") as writer:
    ...     writer.append(np.arange(10), metadata={"title": "digits"})
    >>> stream = TokenStream(folder, window=4)
    >>> rows = open_collection(stream, elements=["X", "spans", "metadata"])[[1]]
    >>> rows.X
    array([[4, 5, 6, 7]], dtype=uint16)
    >>> stream.spans(rows)
    [[Span(start=-4, stop=6, metadata={'title': 'digits'}, shard=0, id=0)]]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        window: int = 4096,
        *,
        stride: int | None = None,
        documents: bool = False,
        decoder: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.location = Location.of(folder)
        window = require_positive("window", window)
        stride = window if stride is None else require_positive("stride", stride)
        self._decoder = decoder
        self._shards = Shards(self.location)
        self._rows: Documents | Windows
        if documents:
            self._require_documents()
            self._rows = Documents(self._shards)
            require_rows(self._shards, self._rows, None)
            tokens: StoredElement = DocumentTokens(self._shards, self._rows)
        else:
            self._rows = Windows(self._shards, window, stride)
            require_rows(self._shards, self._rows, window)
            tokens = WindowTokens(self._shards, self._rows, window)
        elements = {"X": tokens}
        if any(header.n_spans for header in self._shards.headers):
            reader = SpanReader(self._shards, self._rows)
            elements["spans"] = SpansElement(self._shards, self._rows, reader)
            elements["metadata"] = MetadataElement(self._shards, self._rows, reader)
        self.elements: Mapping[str, StoredElement] = elements
        self._labels = Labels(self._shards, self._rows)
        self._shown_rows = "documents=True" if documents else f"window={window}, stride={stride}"

    def __repr__(self) -> str:
        return f"TokenStream({str(self.location)!r}, {self._shown_rows})"

    def selection(self) -> str:
        """Return the kind of its rows: windows of a length and stride, or documents."""
        return self._shown_rows

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all finished shards."""
        return self._shards.n_tokens

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards, by shard number."""
        return tuple(name.rpartition(".")[0] for name in self._shards.names)

    def verify(self) -> None:
        """Read all files completely, and compare them with their checksums.

        Raises
        ------
        FormatError
            The contents of a file have changed since it was written.
        """
        self._shards.verify()

    def spans(self, rows: Any) -> list[list[Span]]:
        """Return the spans of each row of a minibatch, with their metadata decoded.

        Parameters
        ----------
        rows
            A `Minibatch`, or `Cells`, with the elements ``"spans"`` and ``"metadata"``.

        Raises
        ------
        ParameterError
            ``rows`` lacks these elements, or the metadata was written with a custom encoder and no
            ``decoder`` was given.
        """
        names = [*rows.keys()]
        for name in ("spans", "metadata"):
            if not any(each == name or each.startswith(f"{name}/") for each in names):
                msg = f"these rows have no {name!r}; open with elements=['X', 'spans', 'metadata']"
                raise ParameterError(msg)
        decode = self._require_decoder()
        start, stop, shard, number, n_bytes = (_field(rows, name) for name in _FIELDS)
        offsets = _numpy((rows["spans"] if "spans" in rows else rows["spans/start"]).offsets)
        encoded = _numpy(rows["metadata"].values).tobytes()
        ends = np.concatenate([[0], np.cumsum(n_bytes)]).tolist()
        keys = list(zip(shard, number, strict=True))
        distinct = {key: encoded[a:b] for key, a, b in zip(keys, ends, ends[1:], strict=False)}
        decoded = dict(zip(distinct, map(decode, distinct.values()), strict=True))
        found = list(map(Span, start, stop, map(decoded.__getitem__, keys), shard, number))
        bounds = offsets.tolist()
        return [found[a:b] for a, b in itertools.pairwise(bounds)]

    def obs_names(self) -> list[str]:
        """Return the obs columns: ``shard``, and the attributes of documents."""
        return self._labels.names()

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read columns of all rows, from the shard and the document in which each row begins."""
        return self._labels.read(columns, np.arange(self.n_rows))

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read columns of the given rows, indexed by row number."""
        table = self._labels.read(columns, rows)
        return table.set_index(pd.Index([str(row) for row in rows.tolist()], dtype=object))

    def _require_documents(self) -> None:
        for name, header in zip(self._shards.names, self._shards.headers, strict=True):
            if header.n_documents is None:
                msg = f"{self.location}/{name}: was written without documents; leave out"
                raise FormatError(f"{msg} `documents`, or write it with documents=True")

    def _require_decoder(self) -> Callable[[bytes], Any]:
        if self._decoder is not None:
            return self._decoder
        for name, header in zip(self._shards.names, self._shards.headers, strict=True):
            if header.encoding != "json":
                msg = f"{self.location}/{name}: metadata is encoded as {header.encoding!r}"
                raise ParameterError(f"{msg}; give its `decoder` to `TokenStream`")
        return _from_json


def _from_json(encoded: bytes) -> Any:
    return _DECODER.decode(encoded.decode())  # `json.loads` would detect the encoding first


def _field(rows: Any, name: str) -> list[int]:
    if "spans" in rows:
        values = _numpy(rows["spans"].values)[name]
    else:
        values = _numpy(rows[f"spans/{name}"].values)
    numbers: list[int] = values.tolist()
    return numbers


def _numpy(values: Any) -> NDArray[Any]:
    """Return an array, or a tensor on any device, as a NumPy array."""
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


# Folders that are token streams.


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has all
    return [TokenStream(location)]


def _has_shards(path: Path) -> bool:
    """Return whether a folder contains shards, finished or not."""
    if not path.is_dir():
        return False
    with os.scandir(path) as entries:
        return any(
            (each.name.endswith(SUFFIX) and each.is_dir())
            or (each.name.startswith(".") and each.name.endswith(UNFINISHED))
            for each in entries
        )


TOKEN_STREAM = Storage(
    name="token stream",
    open=_open,
    recognizes=_has_shards,
    facts=StorageFacts(
        recognized="a folder of shards written by `TokenStreamWriter`",
        reading="fast: windows and documents are read into place; spans by one thread",
        labels="the shard, obs of documents",
    ),
)
