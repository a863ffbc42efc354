"""Sparse rows of one source that are each stored in several ranges."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkReads, KeptElements, ValueSteps, place_elements
from cellfeed._layouts import CsrPieces, CsrTarget
from cellfeed._reading._parts import Part

__all__ = ["PiecedRows", "SelectedPieces"]


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
        return [reads], [_KeptColumns(kept, rows, order, before, target)]


@dataclass(frozen=True, slots=True, eq=False)
class _KeptColumns:
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
