"""Sparse rows of one source: known by their lengths, or still to be read for them.

Lengths are known of what has a row pointer, as long as no column is left out. Else column indices
are read first, or, of what is not decoded here, rows.
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
        """Whose they are."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many elements each has in the collection, shape (n_rows,)."""
        ...

    def to(
        self, target: CsrTarget, steps: ValueSteps | None
    ) -> tuple[list[ChunkReads], list[PlacedRows | DirectRows]]:
        """Return what is to be decoded, and what is to be placed, so that they come there.

        Values go through steps on their way if they `go_through`.
        """
        ...

    @property
    def go_through(self) -> bool:
        """Whether values go through steps on their way."""
        ...


def sparse_rows(
    part: Part, dtype: np.dtype[Any]
) -> "KnownRows | PiecedRows | SelectedRows | SelectedPieces | ArrivingRows":
    """Return the rows of a part, by what is known of them.

    Parameters
    ----------
    part
        Whose they are.
    dtype
        What values are cast to.
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
    """Rows of which nothing is left out.

    Parameters
    ----------
    part, lengths
        Whose they are, and how many elements each has, int64, shape (n_rows,).
    chunked, starts
        Where they are stored, and where each begins there; None if they are not decoded here.
    """

    part: Part
    lengths: NDArray[np.int64]
    chunked: CsrChunks | None = None
    starts: NDArray[np.int64] | None = None

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks that they take, of which nothing can be placed."""
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
    """Rows whose column indices are to be read first, since some are left out.

    Parameters
    ----------
    part, chunked
        Whose they are, and where they are stored.
    starts, stored_lengths
        Where each begins there, and with how many elements, int64, shape (n_rows,).
    indices
        What is to be read for `with_kept`, by `ChunkReads.select`.
    """

    part: Part
    chunked: CsrChunks
    starts: NDArray[np.int64]
    stored_lengths: NDArray[np.int64]
    indices: ChunkReads

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks that they may take, of which nothing can be placed."""
        return [self.indices, _chunks(self.chunked.data, self.starts, self.stored_lengths)]

    def with_kept(self, kept: KeptElements) -> SparseRows:
        """Return the rows, of which these elements are kept."""
        return _KeptRows(self.part, self.chunked, self.starts, kept)


@dataclass(frozen=True, slots=True, eq=False)
class _KeptRows:
    """Rows whose columns are in memory, and whose values are still to be read."""

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
    """The columns of `_KeptRows`, on their way to where they go."""

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
    """Rows that are to be read first, since nothing is known of their lengths."""

    part: Part

    def chunks(self) -> list[ChunkReads]:
        """Return the bytes that they take, where these are known."""
        return _announced(self.part)

    def read(self, n_columns: int, decoder: Decoder) -> SparseRows:
        """Read them.

        Parameters
        ----------
        n_columns
            Columns of the collection.
        decoder
            Who decodes.

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
