"""Ragged rows of one source, whose lengths are known or must be found by reading."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import RaggedRows
from cellfeed._chunks import ChunkReads, can_cast
from cellfeed._layouts import RaggedChunks, RaggedTarget
from cellfeed._reading._parts import Part, PlacedRows, RowsInMemory, StoredRows
from cellfeed._runs import expand

__all__ = ["ArrivingRagged", "KnownRagged", "RaggedPart", "ragged_part"]


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
