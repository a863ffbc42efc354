"""Reading the spans that overlap rows, and their metadata."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore
from cellfeed._cells import RaggedRows
from cellfeed._chunks import RowExtents, RowRanges
from cellfeed._layouts import RaggedRanges
from cellfeed._runs import expand
from cellfeed._sources._base import read_ragged
from cellfeed._sources._tokens._format import INDEX, METADATA, SPAN_RECORD, SPANS
from cellfeed._sources._tokens._rows import TokenRows, pieces_of
from cellfeed._sources._tokens._shards import Shards

__all__ = ["SPAN", "SpanReader"]

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
    pieces: RowExtents
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
        pieces = pieces_of(self._shards.bounds, *self._rows.ranges(rows))
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

    def _located(self, pieces: RowExtents) -> NDArray[np.int64]:
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

    def _first_records(self, pieces: RowExtents, first: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of records in the first block of each piece."""
        counts = np.zeros(pieces.rows.size, np.int64)
        there = np.flatnonzero(self._has_spans[pieces.files])
        shards = pieces.files[there]
        blocks = pieces.firsts[there] // self._blocks[shards]
        counts[there] = self._index.rows(shards, blocks + 1)[:, 0] - first[there]
        return counts

    def _ranges(
        self, name: str, dtype: np.dtype[Any], shards: NDArray[np.int64], ranges: NDArray[np.int64]
    ) -> RaggedRanges:
        files: ByteStore = self._files[name]
        values = RowRanges(
            name=name,
            shape=(len(ranges),),
            dtype=dtype,
            files=files,
            pieces=partial(_pieces, shards, ranges),
        )
        return RaggedRanges(values)

    def _check(self, wrong: NDArray[np.bool_], shards: NDArray[np.int64], name: str) -> None:
        if wrong.any():
            shard = int(shards[np.flatnonzero(wrong)[0]])
            raise self._shards.damaged(shard, name, "has impossible spans")


def _pieces(
    shards: NDArray[np.int64], ranges: NDArray[np.int64], rows: NDArray[np.int64]
) -> RowExtents:
    """Return ranges of files as pieces, one per row."""
    counts = ranges[rows, 1] - ranges[rows, 0]
    there = np.flatnonzero(counts)
    return RowExtents(
        rows=there,
        files=shards[rows[there]],
        firsts=ranges[rows[there], 0],
        counts=counts[there],
        within=np.zeros(there.size, np.int64),
    )


def _offsets(n_rows: int, of_row: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.bincount(of_row, minlength=n_rows)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
