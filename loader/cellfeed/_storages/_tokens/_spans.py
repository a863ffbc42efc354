"""Reading the spans that overlap rows, and their metadata."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore
from cellfeed._decode import FileExtents, RowRanges
from cellfeed._errors import FormatError
from cellfeed._rows import RaggedRows
from cellfeed._runs import expand
from cellfeed._storages._base import read_ragged
from cellfeed._storages._tokens._format import (
    DOCUMENTS,
    INDEX,
    METADATA,
    SPAN_RECORD,
    SPANS,
    Shards,
)

# The rows of a stream: windows, or documents.


class TokenRows(Protocol):
    """Rows of a stream."""

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        ...

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where rows begin in the stream, and the number of tokens of each."""
        ...

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shard in which each row begins."""
        ...

    def documents_of(self, shard: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document of a shard that each row is, or in which it begins."""
        ...


class Windows:
    """Windows of equal length, which may cross shards; a shorter last window is left out.

    Parameters
    ----------
    shards
        The shards of the stream.
    window, stride
        Number of tokens of a window, and between the starts of consecutive windows.
    """

    def __init__(self, shards: Shards, window: int, stride: int) -> None:
        self._shards, self._window, self._stride = shards, window, stride
        self._offsets = shards.table(DOCUMENTS, "<i8")
        self.n_rows = max(0, (shards.n_tokens - window) // stride + 1)

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `TokenRows`."""
        return rows * self._stride, np.full(rows.size, self._window, np.int64)

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `TokenRows`."""
        starts = rows * self._stride
        return np.asarray(np.searchsorted(self._shards.bounds, starts, side="right") - 1)

    def documents_of(self, shard: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `TokenRows`."""
        starts = rows * self._stride - self._shards.bounds[shard]
        return np.asarray(np.searchsorted(self._offsets.of(shard), starts, side="right") - 1)


class Documents:
    """Documents, in the order in which they were appended to the shards.

    Parameters
    ----------
    shards
        The shards of the stream, all of which have documents.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        counts = [header.n_documents or 0 for header in shards.headers]
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._offsets = shards.table(DOCUMENTS, "<i8")
        self._longest = np.array([each.longest_document for each in shards.headers], np.int64)
        self.n_rows = int(self._firsts[-1])

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `TokenRows`."""
        shards = self.shards_of(rows)
        own = rows - self._firsts[shards]
        starts, stops = self._offsets.rows(shards, own), self._offsets.rows(shards, own + 1)
        sizes = np.diff(self._shards.bounds)[shards]
        wrong = (starts < 0) | (stops < starts) | (stops > sizes)
        wrong |= stops - starts > self._longest[shards]
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            what = f"document {own[bad]} has tokens {starts[bad]} to {stops[bad]}"
            raise self._shards.damaged(int(shards[bad]), DOCUMENTS, what)
        return self._shards.bounds[shards] + starts, stops - starts

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `TokenRows`."""
        return np.asarray(np.searchsorted(self._firsts, rows, side="right") - 1)

    def documents_of(self, shard: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `TokenRows`."""
        return np.asarray(rows - self._firsts[shard])


def extents_of(
    bounds: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> FileExtents:
    """Return ranges of a stream by shard.

    Parameters
    ----------
    bounds
        Where each shard begins, ascending, int64, shape (n_shards + 1,).
    starts, lengths
        The ranges: first token and number of tokens, int64, shape (n,).

    Examples
    --------
    >>> extents_of(np.array([0, 4, 10]), np.array([1, 3]), np.array([2, 4])).files.tolist()
    [0, 0, 1]
    """
    first = np.searchsorted(bounds, starts, side="right") - 1
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


def require_rows(shards: Shards, rows: TokenRows, window: int | None) -> None:
    """Check that the stream has rows.

    Raises
    ------
    FormatError
        It has none.
    """
    if rows.n_rows:
        return
    what = "document" if window is None else f"window of {window:,} tokens"
    remedy = "append some" if window is None else "give a smaller `window`"
    raise FormatError(f"{shards.location}: has {shards.n_tokens:,} tokens but no {what}; {remedy}")


SPAN = np.dtype(
    [("start", "<i8"), ("stop", "<i8"), ("shard", "<i8"), ("id", "<i8"), ("n_bytes", "<i8")]
)
"""A delivered span: its tokens relative to the first of the row, the shard, the number of its
metadata there, and their size in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Spans of rows: their records, their pieces, and the start of the pieces' metadata.

    ``pieces`` are the rows by shard, ``metadata`` the byte range of each, shape (n_pieces, 2).
    """

    rows: NDArray[np.int64]
    pieces: FileExtents
    records: NDArray[Any]
    of_piece: NDArray[np.int64]
    metadata: NDArray[np.int64]


class SpanReader:
    """Reads the spans of rows, and their metadata.

    The memory-mapped index locates the records of a window: the blocks that the window overlaps
    are contiguous, and each lists the spans that overlap it. A span that is in several blocks is
    read once.

    Parameters
    ----------
    shards, rows
        The shards of the stream, and its rows.
    """

    def __init__(self, shards: Shards, rows: TokenRows) -> None:
        self._shards, self._rows = shards, rows
        self._has_spans = np.array([header.n_spans > 0 for header in shards.headers])
        self._blocks = np.array([header.block for header in shards.headers], np.int64)
        self._sizes = np.array(
            [
                [each.files.get(name, (0, 0))[0] for name in (SPANS, METADATA)]
                for each in shards.headers
            ],
            np.int64,
        )
        self._index = shards.index()
        self._files = {name: shards.files(name) for name in (SPANS, METADATA)}
        self._last: _Found | None = None  # metadata is read after the spans of the same rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def spans(self, rows: NDArray[np.int64]) -> RaggedRows:
        """Return the spans of ascending rows, sorted by start; values are `SPAN`."""
        found = self._find(rows)
        records, pieces = found.records, found.pieces
        spans = np.zeros(records.size, SPAN)
        shift = (pieces.within - pieces.firsts)[found.of_piece]
        spans["start"], spans["stop"] = records["start"] + shift, records["stop"] + shift
        spans["shard"] = pieces.files[found.of_piece]
        spans["id"], spans["n_bytes"] = records["id"], records["n_bytes"]
        return RaggedRows(_offsets(rows.size, pieces.rows[found.of_piece]), spans)

    def metadata(self, rows: NDArray[np.int64]) -> RaggedRows:
        """Return the metadata of the spans of rows, in the order of the spans; values are uint8."""
        found = self._find(rows)
        ranges = self._ranges(METADATA, np.dtype(np.uint8), found.pieces.files, found.metadata)
        stored = read_ragged(ranges, np.arange(found.pieces.rows.size))
        of, n_bytes = found.of_piece, found.records["n_bytes"].astype(np.int64)
        firsts = found.records["first_byte"] - found.metadata[of, 0]
        self._check(
            (firsts < 0) | (n_bytes < 0) | (firsts + n_bytes > stored.lengths[of]),
            found.pieces.files[of],
            SPANS,
        )
        firsts += stored.offsets[of]
        values = stored.values[expand(np.stack([firsts, firsts + n_bytes], axis=1))]
        of_row = np.repeat(found.pieces.rows[of], n_bytes)
        return RaggedRows(_offsets(rows.size, of_row), values)

    def _find(self, rows: NDArray[np.int64]) -> _Found:
        if self._last is None or not np.array_equal(self._last.rows, rows):
            self._last = self._read(rows)
        return self._last

    def _read(self, rows: NDArray[np.int64]) -> _Found:
        pieces = extents_of(self._shards.bounds, *self._rows.ranges(rows))
        located = self._located(pieces)
        stored = read_ragged(
            self._ranges(SPANS, SPAN_RECORD, pieces.files, located[:, :, 0]),
            np.arange(pieces.rows.size),
        )
        records, of_piece = stored.values, np.repeat(np.arange(len(stored)), stored.lengths)
        starts, stops = pieces.firsts[of_piece], (pieces.firsts + pieces.counts)[of_piece]
        # If a span is in several blocks, take the record in the first block that the row overlaps.
        first_records = self._first_records(pieces, located[:, 0, 0])[of_piece]
        in_first = np.arange(records.size) - stored.offsets[of_piece] < first_records
        is_kept = in_first | (records["began_before"] == 0)
        is_kept &= (records["start"] < stops) & (records["stop"] > starts)
        return _Found(rows, pieces, records[is_kept], of_piece[is_kept], located[:, :, 1])

    def _located(self, pieces: FileExtents) -> NDArray[np.int64]:
        """Return the first and last record and metadata byte of each piece, shape (n, 2, 2)."""
        located = np.zeros((pieces.rows.size, 2, 2), np.int64)
        there = np.flatnonzero(self._has_spans[pieces.files])
        shards = pieces.files[there]
        firsts, block = pieces.firsts[there], self._blocks[shards]
        located[there, 0] = self._index.rows(shards, firsts // block)
        last = (firsts + pieces.counts[there] - 1) // block
        located[there, 1] = self._index.rows(shards, last + 1)
        most = self._sizes[pieces.files] // [SPAN_RECORD.itemsize, 1]
        wrong = (located[:, 0] < 0) | (located[:, 1] < located[:, 0]) | (located[:, 1] > most)
        self._check(np.logical_or.reduce(wrong, axis=1), pieces.files, INDEX)
        return located

    def _first_records(self, pieces: FileExtents, first: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of records in the first block of each piece."""
        counts = np.zeros(pieces.rows.size, np.int64)
        there = np.flatnonzero(self._has_spans[pieces.files])
        shards = pieces.files[there]
        blocks = pieces.firsts[there] // self._blocks[shards]
        counts[there] = self._index.rows(shards, blocks + 1)[:, 0] - first[there]
        return counts

    def _ranges(
        self, name: str, dtype: np.dtype[Any], shards: NDArray[np.int64], ranges: NDArray[np.int64]
    ) -> RowRanges:
        files: ByteStore = self._files[name]
        return RowRanges(
            name=name,
            shape=(len(ranges),),
            dtype=dtype,
            files=files,
            extents=partial(_extents, shards, ranges),
        )

    def _check(self, wrong: NDArray[np.bool_], shards: NDArray[np.int64], name: str) -> None:
        if wrong.any():
            shard = int(shards[np.flatnonzero(wrong)[0]])
            raise self._shards.damaged(shard, name, "has impossible spans")


def _extents(
    shards: NDArray[np.int64], ranges: NDArray[np.int64], rows: NDArray[np.int64]
) -> FileExtents:
    """Return ranges of files as extents, one per row."""
    counts = ranges[rows, 1] - ranges[rows, 0]
    there = np.flatnonzero(counts)
    return FileExtents(
        lengths=counts,
        rows=there,
        files=shards[rows[there]],
        firsts=ranges[rows[there], 0],
        counts=counts[there],
        within=np.zeros(there.size, np.int64),
    )


def _offsets(n_rows: int, of_row: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.bincount(of_row, minlength=n_rows)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
