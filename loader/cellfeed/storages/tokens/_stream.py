"""`TokenStream`: a folder of token shards, with windows or documents as rows."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.decode import FileExtents, RowRanges
from cellfeed.extending import FormatError, ParameterError, pd, require_list, require_positive
from cellfeed.rows import RaggedRows
from cellfeed.sources import (
    ChunkedElement,
    Runs,
    Source,
    Storage,
    StoredElement,
    expand,
    failures_named,
    read_ragged,
)
from cellfeed.storages.tokens import _shards

# The elements of a token stream: tokens, and spans with their metadata.


class Tokens(ChunkedElement):
    """Windows or documents, read by compiled threads: one read for each shard that a row lies in.

    Windows have equal length and may cross shards; a shorter last window is left out. Documents are
    in the order in which they were appended to the shards.

    Parameters
    ----------
    shards
        The shards of the stream.
    window, stride
        Number of tokens of a window, and between the starts of consecutive windows; for documents,
        None and 1.
    """

    var = None
    stored_as = _shards.TOKENS

    def __init__(self, shards: _shards.Shards, window: int | None, stride: int) -> None:
        self._shards, self._window, self._stride = shards, window, stride
        self._files, self.dtype = shards.files(_shards.TOKENS), shards.dtype
        if window is None:
            counts = [header.n_documents or 0 for header in shards.headers]
            self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
            self.layout, self.shape = "ragged", (int(self._firsts[-1]),)
        else:
            self._firsts = shards.bounds
            n_rows = max(0, (shards.n_tokens - window) // stride + 1)
            self.layout, self.shape = "dense", (n_rows, window)

    def stored_bytes(self) -> int:
        """Return the size of all tokens in bytes."""
        return self._shards.n_tokens * self.dtype.itemsize

    def load_tables(self) -> None:
        """Read where documents lie."""
        for shard in range(len(self._shards.headers) if self._window is None else 0):
            self._shards.table(_shards.DOCUMENTS, shard)

    def codec(self) -> str:
        """Return that nothing is compressed."""
        return "none"

    def chunked(self) -> RowRanges:
        """Return where rows lie."""
        return RowRanges(
            name="tokens",
            shape=self.shape,
            dtype=self.dtype,
            files=self._files,
            extents=self.extents,
        )

    def extents(self, rows: NDArray[np.int64]) -> FileExtents:
        """Return where the tokens of rows lie in the shards."""
        bounds = self._shards.bounds
        starts, lengths = self._ranges(rows)
        first = _last_not_above(bounds, starts)
        stop = np.searchsorted(bounds, starts + lengths, side="left")
        n_pieces = np.where(lengths > 0, stop - first, 0)
        rows = np.repeat(np.arange(starts.size), n_pieces)
        shards = expand(np.stack([first, first + n_pieces], axis=1))
        begins = np.maximum(starts[rows], bounds[shards])
        counts = np.minimum((starts + lengths)[rows], bounds[shards + 1]) - begins
        there = np.flatnonzero(counts)  # shards may be empty
        rows, shards, begins = rows[there], shards[there], begins[there]
        return FileExtents(
            lengths=lengths,
            rows=rows,
            files=shards,
            firsts=begins - bounds[shards],
            counts=counts[there],
            within=begins - starts[rows],
        )

    def _ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where rows begin in the stream, and the number of tokens of each."""
        if self._window is not None:
            return rows * self._stride, np.full(rows.size, self._window, np.int64)
        shards = self.shards_of(rows)
        own = rows - self._firsts[shards]
        starts, stops = (self._shards.entries(_shards.DOCUMENTS, shards, own + k) for k in range(2))
        longest = np.array([each.longest_document for each in self._shards.headers])[shards]
        wrong = (starts < 0) | (stops < starts) | (stops - starts > longest)
        wrong |= stops > np.diff(self._shards.bounds)[shards]
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            what = f"document {own[bad]} has tokens {starts[bad]} to {stops[bad]}"
            raise self._shards.damaged(int(shards[bad]), _shards.DOCUMENTS, what)
        return self._shards.bounds[shards] + starts, stops - starts

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shard in which each row begins."""
        return _last_not_above(self._firsts, rows * self._stride)

    def documents_of(self, shard: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document of a shard in which each row begins."""
        own: NDArray[np.int64] = rows * self._stride - self._firsts[shard]
        if self._window is None:
            return own
        return _last_not_above(self._shards.table(_shards.DOCUMENTS, shard), own)


def _last_not_above(bounds: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(np.searchsorted(bounds, values, side="right") - 1)


SPAN = np.dtype(
    [(name, "<i8") for name in ("start", "stop", "shard", "id", "first_byte", "n_bytes")]
)
"""A delivered span: its tokens relative to the first of the row, the shard, its number there, and
the bytes of its metadata."""


class SpanElement(StoredElement):
    """The spans that overlap each row. How many there are is known only after they are read.

    The memory-mapped index locates the records of a window: the blocks that the window overlaps
    are contiguous, and each lists the spans that overlap it. A span that is in several blocks is
    read once.

    Parameters
    ----------
    shards, tokens
        The shards of the stream, and its rows.
    """

    layout = "ragged"
    var = None
    dtype = SPAN
    stored_as = _shards.SPANS

    def __init__(self, shards: _shards.Shards, tokens: Tokens) -> None:
        self._shards, self._tokens, self.shape = shards, tokens, tokens.shape[:1]
        self._blocks = np.array([header.block for header in shards.headers], np.int64)
        self._sizes = {
            name: np.array([header.files.get(name, 0) for header in shards.headers], np.int64)
            for name in (_shards.SPANS, _shards.METADATA)
        }
        self._files = {name: shards.files(name) for name in (_shards.SPANS, _shards.METADATA)}
        if shards.location.is_remote:
            self.expected_row_bytes = self.stored_bytes() / self.shape[0]

    def stored_bytes(self) -> int:
        """Return the size of all records in bytes."""
        return int(self._sizes[_shards.SPANS].sum())

    def codec(self) -> str:
        """Return that nothing is compressed."""
        return "none"

    def load_tables(self) -> None:
        """Read the index of spans."""
        for shard in np.flatnonzero(self._sizes[_shards.SPANS]).tolist():
            self._shards.table(_shards.INDEX, shard)

    def expect(self, runs: Runs) -> object:
        """Request what `read_rows` will read from a server, without waiting."""
        _, _, stored = self._located(expand(runs))
        every = np.arange(stored.shape[0])
        return stored.reads(every, np.zeros_like(every), _shards.SPAN_RECORD).readahead()

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read the spans of rows, sorted by start."""
        rows = expand(runs)
        extents, n_in_first, ranges = self._located(rows)
        stored = read_ragged(ranges, np.arange(n_in_first.size))
        records, of_extent = stored.values, np.repeat(np.arange(len(stored)), stored.lengths)
        starts, stops = extents.firsts[of_extent], (extents.firsts + extents.counts)[of_extent]
        # If a span is in several blocks, take the record in the first block that the row overlaps.
        places = np.arange(records.size) - stored.offsets[of_extent]
        overlaps = (places < n_in_first[of_extent]) | (records["began_before"] == 0)
        overlaps &= (records["start"] < stops) & (records["stop"] > starts)
        records, of_extent = records[overlaps], of_extent[overlaps]
        spans = np.zeros(records.size, SPAN)
        shift = (extents.within - extents.firsts)[of_extent]
        spans["start"], spans["stop"] = records["start"] + shift, records["stop"] + shift
        spans["shard"] = extents.files[of_extent]
        for name in ("id", "first_byte", "n_bytes"):
            spans[name] = records[name]
        counts = np.bincount(extents.rows[of_extent], minlength=rows.size)
        return RaggedRows(np.append(0, np.cumsum(counts)), spans)

    def metadata(
        self, shards: NDArray[np.int64], firsts: NDArray[np.int64], n_bytes: NDArray[np.int64]
    ) -> list[Any]:
        """Return the decoded metadata of spans; those with the same one get the same object."""
        sizes = self._sizes[_shards.METADATA]
        wrong = (firsts < 0) | (n_bytes < 0) | (firsts + n_bytes > sizes[shards])
        self._check(wrong, shards, _shards.SPANS)
        shifts = np.cumsum(sizes) - sizes
        _, distinct, which = np.unique(
            shifts[shards] + firsts, return_index=True, return_inverse=True
        )
        first, n = firsts[distinct], n_bytes[distinct]
        dtype = np.dtype(np.uint8)
        ranges = self._stored(_shards.METADATA, dtype, shards[distinct], first, first + n)
        found = read_ragged(ranges, np.arange(distinct.size))
        encoded, bounds = found.values.tobytes(), itertools.pairwise(found.offsets.tolist())
        what = f"{self._shards.location}: metadata of spans cannot be read"
        with failures_named(what, "a shard is damaged, copy or write it again"):
            decoded = [json.loads(encoded[a:b].decode()) for a, b in bounds]
        return [decoded[number] for number in which.tolist()]

    def _located(self, rows: NDArray[np.int64]) -> tuple[FileExtents, NDArray[np.int64], RowRanges]:
        """Return the extents of rows, and where the records of each lie.

        The records of an extent are those of its blocks; the second array states how many of them
        are those of its first block.
        """
        extents = self._tokens.extents(rows)
        located = np.zeros((3, extents.rows.size), np.int64)
        most = self._sizes[_shards.SPANS][extents.files] // _shards.SPAN_RECORD.itemsize
        there = np.flatnonzero(most)
        shards = extents.files[there]
        first = extents.firsts[there] // self._blocks[shards]
        last = (extents.firsts + extents.counts - 1)[there] // self._blocks[shards]
        for k, blocks in enumerate((first, first + 1, last + 1)):
            located[k, there] = self._shards.entries(_shards.INDEX, shards, blocks)
        begins, of_second, ends = located
        self._check((begins < 0) | (ends < begins) | (ends > most), extents.files, _shards.INDEX)
        stored = self._stored(_shards.SPANS, _shards.SPAN_RECORD, extents.files, begins, ends)
        return extents, of_second - begins, stored

    def _stored(
        self,
        name: str,
        dtype: np.dtype[Any],
        shards: NDArray[np.int64],
        firsts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> RowRanges:
        """Return one range of a file of each given shard, as a row."""

        def extents(rows: NDArray[np.int64]) -> FileExtents:
            counts = (ends - firsts)[rows]
            there = np.flatnonzero(counts)
            return FileExtents(
                lengths=counts,
                rows=there,
                files=shards[rows[there]],
                firsts=firsts[rows[there]],
                counts=counts[there],
                within=np.zeros(there.size, np.int64),
            )

        return RowRanges(
            name=name, shape=(len(firsts),), dtype=dtype, files=self._files[name], extents=extents
        )

    def _check(self, wrong: NDArray[np.bool_], shards: NDArray[np.int64], name: str) -> None:
        if wrong.any():
            shard = int(shards[np.flatnonzero(wrong)[0]])
            raise self._shards.damaged(shard, name, "has impossible spans")


_SHARD = "shard"  # the obs column with the shard in which a row begins
_FIELDS = SPAN.names or ()


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
    """A stream of tokens in a folder, local or on a server, which `TokenStreamWriter` wrote.

    Pass it to `open_collection` in place of a path; for windows of 4,096 tokens, the path suffices.
    Rows are either windows of equal length, which may cross the borders of shards and documents,
    or documents.

    Parameters
    ----------
    folder
        Folder of the shards, which are read in the order of their names: a path or a URL.
    window
        Number of tokens in a row. A shorter last window is left out.
    stride
        Number of tokens between the starts of consecutive rows; ``window`` if None.
    documents
        Whether rows are documents, of any length, in place of windows.
    shards
        Names of the shards to read; all of them if None. Web servers, which cannot list folders,
        require it; object stores do not.
    storage_options
        Options for the server, as in `open_collection`.

    Attributes
    ----------
    elements
        ``"X"``, the tokens: shape (n_rows, window) for windows, `RaggedRows` for documents. If
        tokens have fields, the dtype is structured, and torch gets ``"X/FIELD"`` for each field.
        If there are spans: ``"spans"``, the spans that overlap each row, sorted by start, with the
        fields ``start``, ``stop``, ``shard``, ``id``, and the place of their metadata,
        ``first_byte`` and ``n_bytes``.

    Raises
    ------
    PathError
        There is no such folder or shard, or a server cannot list the shards.
    RemoteError
        A server cannot be reached, or refuses the request.
    FormatError
        The folder has no finished shard, a shard is damaged, or there is no window or document.
    ParameterError
        The window or the stride is below one, or ``shards`` is not a list of names.

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
    >>> rows = open_collection(stream, elements=["X", "spans"])[[1]]
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
        shards: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.location = Location.of(folder, storage_options)
        window = require_positive("window", window)
        stride = window if stride is None else require_positive("stride", stride)
        if shards is not None:
            require_list("shards", "names", shards)
        opened = self._shards = _shards.Shards(self.location, shards)
        if documents:
            for name, header in zip(opened.names, opened.headers, strict=True):
                if header.n_documents is None:
                    msg = f"{self.location}/{name}: was written without documents; leave out"
                    raise FormatError(f"{msg} `documents`, or write it with documents=True")
        tokens = Tokens(opened, *((None, 1) if documents else (window, stride)))
        if not tokens.shape[0]:
            what = "document; append some"
            if not documents:
                what = f"window of {window:,} tokens; give a smaller `window`"
            raise FormatError(f"{self.location}: has {opened.n_tokens:,} tokens but no {what}")
        self._tokens = tokens
        self.elements: dict[str, StoredElement] = {"X": tokens}
        if any(header.n_spans for header in opened.headers):
            self.elements["spans"] = SpanElement(opened, tokens)
        self._shown_rows = "documents=True" if documents else f"window={window}, stride={stride}"
        if opened.are_some:
            self._shown_rows += f", shards={list(self.shard_names)}"

    def __repr__(self) -> str:
        return f"TokenStream({str(self.location)!r}, {self._shown_rows})"

    def selection(self) -> str:
        """Return the kind of its rows, and the shards if the folder is known to have others."""
        return self._shown_rows

    def version(self) -> str | None:
        """Return a digest that changes when an object on a server is replaced; else None."""
        return self._shards.folder.version()

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all finished shards."""
        return self._shards.n_tokens

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards, by shard number."""
        return tuple(name.rpartition(".")[0] for name in self._shards.names)

    def spans(self, rows: Any) -> list[list[Span]]:
        """Return the spans of each row of a minibatch, with their metadata, which is read here.

        Parameters
        ----------
        rows
            A `Minibatch`, or `Cells`, with the element ``"spans"``.

        Raises
        ------
        ParameterError
            ``rows`` lacks this element.
        FormatError
            Metadata is damaged.
        """
        if "spans" in rows:
            table, offsets = rows["spans"].values, rows["spans"].offsets
        elif "spans/start" in rows:
            table = {name: rows[f"spans/{name}"].values for name in _FIELDS}
            offsets = rows["spans/start"].offsets
        else:
            raise ParameterError("these rows have no 'spans'; open with elements=['X', 'spans']")
        columns = {name: _numpy(table[name]) for name in _FIELDS}
        element: Any = self.elements["spans"]
        where = (columns[name] for name in ("shard", "first_byte", "n_bytes"))
        metadata = element.metadata(*where)
        start, stop, shard, number = (columns[name].tolist() for name in _FIELDS[:4])
        found = list(map(Span, start, stop, metadata, shard, number))
        bounds = _numpy(offsets).tolist()
        return [found[a:b] for a, b in itertools.pairwise(bounds)]

    def obs_names(self) -> list[str]:
        """Return the obs columns: ``shard``, and the attributes of documents in all shards."""
        first, *others = (header.obs for header in self._shards.headers)
        return [_SHARD, *(name for name in first if all(name in obs for obs in others))]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read columns of all rows, from the shard and the document in which each row begins."""
        return self._obs_of(columns, np.arange(self.n_rows))

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read columns of the given rows, indexed by row number."""
        names = pd.Index([str(row) for row in rows.tolist()], dtype=object)
        return self._obs_of(columns, rows).set_index(names)

    def _obs_of(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        shards = self._tokens.shards_of(rows)
        table = pd.DataFrame(index=pd.RangeIndex(rows.size))
        for name in columns:
            if name == _SHARD:
                named = pd.Index(self.shard_names, dtype=object)
                table[name] = pd.Categorical.from_codes(shards, named)
            else:
                table[name] = self._attribute(name, shards, rows)
        return table

    def _attribute(self, name: str, shards: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        parts, bounds = [], np.searchsorted(shards, np.arange(len(self._shards.headers) + 1))
        for shard, header in enumerate(self._shards.headers):
            own, codes = rows[bounds[shard] : bounds[shard + 1]], np.empty(0, np.int64)
            file = f"obs-{[*header.obs].index(name)}.bin"
            if own.size:
                codes = self._shards.table(file, shard)[self._tokens.documents_of(shard, own)]
            categories = pd.Index(header.obs[name], dtype=object)
            if codes.size and not -1 <= codes.min() <= codes.max() < len(categories):
                raise self._shards.damaged(shard, file, "has codes without a category")
            parts.append(pd.Categorical.from_codes(codes, categories))
        return pd.api.types.union_categoricals(parts)


def _numpy(values: Any) -> NDArray[Any]:
    """Return an array, or a tensor on any device, as a NumPy array."""
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


# Folders that are token streams.


def _has_shards(path: Path) -> bool:
    """Return whether a folder contains shards, finished or not."""
    found = (path.glob(pattern) for pattern in (f"*{_shards.SUFFIX}", f".*{_shards.UNFINISHED}"))
    return path.is_dir() and any(each.is_dir() for each in itertools.chain(*found))


TOKEN_STREAM = Storage(
    name="token stream",
    open=lambda location, _: [TokenStream(location)],
    recognizes=_has_shards,
    parts=(_shards.SUFFIX,),
)
