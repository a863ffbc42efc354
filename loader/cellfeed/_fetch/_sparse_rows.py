"""Sparse rows of one source, whose lengths are known or must be found by reading.

Lengths are known if rows have row pointers and no column is left out. Otherwise, column indices
are read first or, if cellfeed does not decode them, rows.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._decode import (
    ChunkedArray,
    ChunkReads,
    Decoder,
    KeptElements,
    ValueSteps,
    can_cast,
    kept_of,
    place_elements,
    place_kept,
)
from cellfeed._fetch._direct_rows import DirectRows, read_in_threads
from cellfeed._fetch._parts import Part, PlacedRows, RowsInMemory, StoredRows
from cellfeed._rows import (
    CsrChunks,
    CsrPieces,
    CsrRows,
    CsrTarget,
    DenseChunks,
    DenseTarget,
    PiecedCsr,
    RaggedChunks,
    RaggedRows,
    RaggedTarget,
)
from cellfeed._runs import Runs, count_rows, expand, merge_consecutive
from cellfeed._storages import DirectCsr

# Sparse rows of one source that are each stored in several ranges.


@dataclass(frozen=True, slots=True, eq=False)
class PiecedRows:
    """Rows with all columns.

    Parameters
    ----------
    part, chunked
        The part, and the chunks of its rows.
    """

    part: Part
    chunked: CsrPieces

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `SparseRows`."""
        return self.chunked.lengths

    go_through = False

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks of the rows, for reading without placing."""
        return self.chunked.chunks()

    def to(
        self,
        target: CsrTarget,
        steps: ValueSteps | None,  # noqa: ARG002 - of the protocol
    ) -> tuple[list[ChunkReads], list[Any]]:
        """See `SparseRows`."""
        return self.chunked.reads_to(target, self.part.columns), []


@dataclass(frozen=True, slots=True, eq=False)
class SelectedPieces:
    """Rows whose column indices must be read first, since some columns are left out.

    Parameters
    ----------
    part, pieces
        The part, and the pieces of its rows.
    indices
        The reads for `with_kept`, through `ChunkReads.select`.
    """

    part: Part
    pieces: CsrPieces
    indices: ChunkReads

    @property
    def stored_lengths(self) -> NDArray[np.int64]:
        """Number of stored elements in each piece."""
        return self.pieces.counts

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks that the rows may need, for reading without placing."""
        return self.pieces.chunks()

    def with_kept(self, kept: KeptElements) -> "KeptPieces":
        """Return the rows with the given kept elements of their pieces."""
        return KeptPieces(self.part, self.pieces, kept)


@dataclass(frozen=True, slots=True, eq=False)
class KeptPieces:
    """Rows whose columns are in memory, and whose values must still be read.

    Parameters
    ----------
    part, pieces
        The part, and the pieces of its rows.
    kept
        The kept elements of each piece.
    """

    part: Part
    pieces: CsrPieces
    kept: KeptElements

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `SparseRows`."""
        n_rows = self.pieces.lengths.size
        return np.bincount(self.pieces.rows, self.kept.lengths, n_rows).astype(np.int64)

    go_through = False

    def to(
        self,
        target: CsrTarget,
        steps: ValueSteps | None,  # noqa: ARG002 - of the protocol
    ) -> tuple[list[ChunkReads], list[Any]]:
        """See `SparseRows`."""
        kept, rows = self.kept, self.pieces.rows
        order = np.argsort(rows, kind="stable")
        before = np.empty_like(rows)
        of_pieces, of_rows = kept.lengths[order], self.lengths
        of_earlier_rows = (np.cumsum(of_rows) - of_rows)[rows[order]]
        before[order] = np.cumsum(of_pieces) - of_pieces - of_earlier_rows
        reads = self.pieces.data.reads_of_kept(
            self.pieces.data_starts,
            kept.starts,
            kept.entries,
            target.data_destinations[rows] + before * target.dtype.itemsize,
            target.dtype,
        )
        return [reads], [_KeptPieceColumns(kept, rows, order, before, target)]


@dataclass(frozen=True, slots=True, eq=False)
class _KeptPieceColumns:
    """The columns of `KeptPieces`, to be placed."""

    kept: KeptElements
    rows: NDArray[np.int64]
    order: NDArray[np.intp]
    before: NDArray[np.int64]
    target: CsrTarget

    def place(self, bases: NDArray[np.int64]) -> bool:
        """See `PlacedRows`."""
        kept, target = self.kept, self.target.bound(bases)
        place_elements(
            kept.columns,
            kept.starts[:-1],
            kept.lengths,
            target.index_destinations[self.rows] + self.before * target.index_dtype.itemsize,
            target.index_dtype,
        )
        filled = self.order[kept.lengths[self.order] > 0]
        goes_on = self.rows[filled[1:]] == self.rows[filled[:-1]]
        last = kept.columns[kept.starts[filled[:-1] + 1] - 1]
        ascend = kept.columns[kept.starts[filled[1:]]] > last
        return kept.ascending and bool(ascend[goes_on].all())


# Dense rows of one source in a collection that is sparse.

_PIECE_BYTES = 1 << 25  # of dense rows that a thread has at once


def dense_as_csr(part: Part, decoder: Decoder) -> CsrRows:
    """Read dense rows, and return their non-zero elements.

    Parameters
    ----------
    part
        Rows of an element of dense layout.
    decoder
        The decoder.

    Raises
    ------
    FormatError
        The storage is damaged.
    """
    stored = part.stored
    n_columns, dtype = stored.shape[1], stored.dtype
    rows = expand(part.runs)
    step = max(1, _PIECE_BYTES // max(1, n_columns * dtype.itemsize))
    pieces = [merge_consecutive(rows[k : k + step]) for k in range(0, rows.size, step)]
    chunked = stored.chunked()

    def planned(runs: Runs) -> tuple[Runs, ChunkReads | None]:
        if not isinstance(chunked, DenseChunks):
            return runs, None
        nowhere = np.arange(count_rows(runs), dtype=np.int64) * n_columns * dtype.itemsize
        target = DenseTarget(n_vars=n_columns, destinations=nowhere, dtype=dtype)
        return runs, target.reads_from(chunked, runs, None)

    def read(piece: tuple[Runs, ChunkReads | None]) -> tuple[NDArray[Any], ...]:
        runs, reads = piece
        if reads is None:
            return _nonzero(replace(part, runs=runs).read_rows())
        dense = np.empty((count_rows(runs), n_columns), dtype)
        reads.run(np.array([dense.ctypes.data], np.int64), decoder.alone())
        return _nonzero(dense)

    found = list[tuple[NDArray[Any], ...]]()
    for first in range(0, len(pieces), decoder.n_threads):
        # A source is asked from one thread at a time; what it says is decoded by many.
        batch = [planned(runs) for runs in pieces[first : first + decoder.n_threads]]
        in_threads = all(reads is not None for _, reads in batch)
        found += decoder.map(read, batch) if in_threads else map(read, batch)
    lengths, columns, values = (np.concatenate(each) for each in zip(*found, strict=True))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return CsrRows(indptr, columns, values, n_columns)


def _nonzero(dense: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the number of elements of each row, their columns, and their values."""
    is_stored = dense != 0
    elements = np.flatnonzero(is_stored)
    columns = elements % max(1, dense.shape[1])
    return is_stored.sum(axis=1), columns, dense.reshape(-1)[elements]


class SparseRows(Protocol):
    """Sparse rows whose lengths are known."""

    @property
    def part(self) -> Part:
        """The part."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of elements in each row of the collection, int64, shape (n_rows,)."""
        ...

    def to(
        self, target: CsrTarget, steps: ValueSteps | None
    ) -> tuple[list[ChunkReads], list[PlacedRows | DirectRows]]:
        """Return the chunk reads and the placed rows for the given destinations.

        Steps are applied to values while they are placed if `go_through`.
        """
        ...

    @property
    def go_through(self) -> bool:
        """Whether steps are applied to values while they are placed."""
        ...


def sparse_rows(
    part: Part, dtype: np.dtype[Any]
) -> "KnownRows | PiecedRows | SelectedRows | SelectedPieces | ArrivingRows":
    """Return the rows of a part, as a class that depends on whether their lengths are known.

    Parameters
    ----------
    part
        The part.
    dtype
        Dtype to which values are cast.
    """
    chunked = part.stored.chunked()
    if isinstance(chunked, CsrChunks) and can_cast(chunked.data.dtype, dtype):
        starts, lengths = chunked.ranges(expand(part.runs))
        if part.keeps_all or part.columns is None:
            return KnownRows(part, lengths, chunked, starts)
        indices = chunked.indices.reads_selecting(starts, lengths, column_map=part.columns)
        return SelectedRows(part, chunked, starts, lengths, indices)
    if isinstance(chunked, PiecedCsr) and can_cast(chunked.dtype, dtype):
        pieces = chunked.pieces(expand(part.runs))
        if part.keeps_all or part.columns is None:
            return PiecedRows(part, pieces)
        return SelectedPieces(part, pieces, pieces.reads_selecting(part.columns))
    known = part.stored.row_lengths(part.runs) if part.keeps_all else None
    return ArrivingRows(part) if known is None else KnownRows(part, known)


@dataclass(frozen=True, slots=True, eq=False)
class KnownRows:
    """Rows with all columns.

    Parameters
    ----------
    part, lengths
        The part, and the number of elements in each row, int64, shape (n_rows,).
    chunked, starts
        The chunks of the rows, and the start of each row in them; None if cellfeed does not decode
        them.
    """

    part: Part
    lengths: NDArray[np.int64]
    chunked: CsrChunks | None = None
    starts: NDArray[np.int64] | None = None

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks of the rows, for reading without placing."""
        if self.chunked is None or self.starts is None:
            return _announced(self.part)
        arrays = (self.chunked.indices, self.chunked.data)
        return [_chunks(array, self.starts, self.lengths) for array in arrays]

    def to(
        self, target: CsrTarget, steps: ValueSteps | None
    ) -> tuple[list[ChunkReads], list[PlacedRows | DirectRows]]:
        """See `SparseRows`."""
        if self.chunked is None or self.starts is None:
            stored = self.part.stored
            if isinstance(stored, DirectCsr):
                return [], [DirectRows(self.part, stored, target)]
            return [], [StoredRows(self.part, target)]
        return target.reads_from(self.chunked, self.starts, self.part.columns, steps), []

    @property
    def go_through(self) -> bool:
        """See `SparseRows`."""
        return self.chunked is not None


@dataclass(frozen=True, slots=True, eq=False)
class SelectedRows:
    """Rows whose column indices must be read first, since some columns are left out.

    Parameters
    ----------
    part, chunked
        The part, and the chunks of its rows.
    starts, stored_lengths
        Start of each row in the stored arrays, and its number of stored elements, int64, shape
        (n_rows,).
    indices
        The reads for `with_kept`, through `ChunkReads.select`.
    """

    part: Part
    chunked: CsrChunks
    starts: NDArray[np.int64]
    stored_lengths: NDArray[np.int64]
    indices: ChunkReads

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks that the rows may need, for reading without placing."""
        return [self.indices, _chunks(self.chunked.data, self.starts, self.stored_lengths)]

    def with_kept(self, kept: KeptElements) -> SparseRows:
        """Return the rows with the given kept elements."""
        return _KeptRows(self.part, self.chunked, self.starts, kept)


@dataclass(frozen=True, slots=True, eq=False)
class _KeptRows:
    """Rows whose columns are in memory, and whose values must still be read."""

    part: Part
    chunked: CsrChunks
    starts: NDArray[np.int64]
    kept: KeptElements

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `SparseRows`."""
        return self.kept.lengths

    go_through = False

    def to(
        self,
        target: CsrTarget,
        steps: ValueSteps | None,  # noqa: ARG002 - of the protocol
    ) -> tuple[list[ChunkReads], list[PlacedRows | DirectRows]]:
        """See `SparseRows`."""
        kept = self.kept
        reads = self.chunked.data.reads_of_kept(
            self.starts, kept.starts, kept.entries, target.data_destinations, target.dtype
        )
        return [reads], [_KeptColumns(kept, target)]


@dataclass(frozen=True, slots=True, eq=False)
class _KeptColumns:
    """The columns of `_KeptRows`, to be placed."""

    kept: KeptElements
    target: CsrTarget

    def place(self, bases: NDArray[np.int64]) -> bool:
        """See `PlacedRows`."""
        target = self.target.bound(bases)
        place_elements(
            self.kept.columns,
            self.kept.starts[:-1],
            target.lengths,
            target.index_destinations,
            target.index_dtype,
        )
        return self.kept.ascending


@dataclass(frozen=True, slots=True, eq=False)
class ArrivingRows:
    """Rows that must be read first, since their lengths are unknown."""

    part: Part

    def chunks(self) -> list[ChunkReads]:
        """Return the byte ranges of the rows, if known."""
        return _announced(self.part)

    def read(self, n_columns: int, decoder: Decoder) -> SparseRows:
        """Read the rows.

        Parameters
        ----------
        n_columns
            Number of columns in the collection.
        decoder
            The decoder.

        Raises
        ------
        FormatError
            The storage is damaged.
        """
        rows: Any
        if self.part.stored.layout == "dense":
            rows = dense_as_csr(self.part, decoder)
        elif isinstance(self.part.stored, DirectCsr):
            rows = read_in_threads(self.part, self.part.stored, decoder)
        else:
            rows = self.part.read_rows()
        if self.part.columns is not None:
            rows = _selected(self.part, rows, self.part.columns, n_columns)
        return _ArrivedRows(self.part, rows)


@dataclass(frozen=True, slots=True, eq=False)
class _ArrivedRows:
    """Rows that are in memory, with the columns of the collection."""

    part: Part
    rows: CsrRows

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `SparseRows`."""
        return np.diff(self.rows.indptr).astype(np.int64)

    go_through = False

    def to(
        self,
        target: CsrTarget,
        steps: ValueSteps | None,  # noqa: ARG002 - of the protocol
    ) -> tuple[list[ChunkReads], list[PlacedRows | DirectRows]]:
        """See `SparseRows`."""
        return [], [RowsInMemory(self.part, self.rows, target)]


def _selected(part: Part, rows: CsrRows, columns: NDArray[np.int32], n_columns: int) -> CsrRows:
    """Return rows with the columns of the collection."""
    try:
        kept = kept_of(rows.indices, np.diff(rows.indptr).astype(np.int64), columns)
    except ValueError as error:
        raise part.wrong(error) from error
    data = np.empty(kept.columns.size, rows.data.dtype)
    place_kept(
        np.ascontiguousarray(rows.data),
        rows.indptr[:-1].astype(np.int64),
        kept.starts,
        kept.entries,
        data.ctypes.data + kept.starts[:-1] * data.itemsize,
    )
    return CsrRows(kept.starts, kept.columns, data, n_columns)


def _announced(part: Part) -> list[ChunkReads]:
    stored = part.stored
    return [stored.stored_rows(expand(part.runs))] if isinstance(stored, DirectCsr) else []


def _chunks(
    array: ChunkedArray, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> ChunkReads:
    return array.reads_of_ranges(starts, lengths, np.zeros(len(starts), np.int64), array.dtype)


# Ragged rows of one source, whose lengths are known or must be found by reading.


class RaggedPart(Protocol):
    """Rows whose lengths are known."""

    @property
    def part(self) -> Part:
        """The part."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of values in each row, int64, shape (n_rows,)."""
        ...

    def to(self, target: RaggedTarget) -> ChunkReads | PlacedRows:
        """Return the reads, or the placed rows, for the given destinations."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KnownRagged:
    """Rows whose lengths are known before they are read.

    Parameters
    ----------
    part, lengths
        The part, and the number of values in each row, int64, shape (n_rows,).
    chunked
        The chunks of the rows; None if cellfeed does not decode them.
    """

    part: Part
    lengths: NDArray[np.int64]
    chunked: RaggedChunks | None = None

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks of the rows, for reading without placing."""
        if self.chunked is None:
            return []
        rows = expand(self.part.runs)
        return [self.chunked.reads_of_rows(rows, np.zeros(rows.size, np.int64), self.chunked.dtype)]

    def to(self, target: RaggedTarget) -> ChunkReads | PlacedRows:
        """See `RaggedPart`."""
        if self.chunked is None:
            return StoredRows(self.part, target)
        return target.reads_from(self.chunked, expand(self.part.runs))


@dataclass(frozen=True, slots=True, eq=False)
class ArrivingRagged:
    """Rows that must be read first, since their lengths are unknown."""

    part: Part

    def read(self) -> "ArrivedRagged":
        """Read the rows.

        Raises
        ------
        FormatError
            The storage is damaged.
        """
        return ArrivedRagged(self.part, self.part.read_rows())


@dataclass(frozen=True, slots=True, eq=False)
class ArrivedRagged:
    """Rows that are in memory."""

    part: Part
    rows: RaggedRows

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `RaggedPart`."""
        return self.rows.lengths

    def to(self, target: RaggedTarget) -> ChunkReads | PlacedRows:
        """See `RaggedPart`."""
        return RowsInMemory(self.part, self.rows, target)


def ragged_part(part: Part, dtype: np.dtype[Any]) -> KnownRagged | ArrivingRagged:
    """Return the rows of a part, as a class that depends on whether their lengths are known.

    Parameters
    ----------
    part
        The part.
    dtype
        Dtype to which values are cast.
    """
    chunked = part.stored.chunked()
    if isinstance(chunked, RaggedChunks) and can_cast(chunked.dtype, dtype):
        return KnownRagged(part, chunked.lengths_of(expand(part.runs)), chunked)
    known = part.stored.row_lengths(part.runs)
    return ArrivingRagged(part) if known is None else KnownRagged(part, known)
