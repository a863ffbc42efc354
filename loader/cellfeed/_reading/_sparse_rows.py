"""Sparse rows of one source, whose lengths are known or must be found by reading.

Lengths are known if rows have row pointers and no column is left out. Otherwise, column indices
are read first or, if cellfeed does not decode them, rows.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CsrRows
from cellfeed._chunks import (
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
from cellfeed._layouts import CsrChunks, CsrTarget, PiecedCsr
from cellfeed._reading._dense_as_csr import dense_as_csr
from cellfeed._reading._direct_rows import DirectRows, read_in_threads
from cellfeed._reading._parts import Part, PlacedRows, RowsInMemory, StoredRows
from cellfeed._reading._pieced_rows import PiecedRows, SelectedPieces
from cellfeed._runs import expand
from cellfeed._sources import DirectCsr

__all__ = ["ArrivingRows", "KnownRows", "SelectedRows", "SparseRows", "sparse_rows"]


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
