"""Rows of any length of one source: known by their lengths, or read to learn them."""

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
        """Whose they are."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many values each has, shape (n_rows,)."""
        ...

    def to(self, target: RaggedTarget) -> ChunkReads | PlacedRows:
        """Return what is to be read, or placed, so that they come there."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KnownRagged:
    """Rows whose lengths are known before they are read.

    Parameters
    ----------
    part, lengths
        Whose they are, and how many values each has, int64, shape (n_rows,).
    chunked
        Where they lie; None if they are not decoded here.
    """

    part: Part
    lengths: NDArray[np.int64]
    chunked: RaggedChunks | None = None

    def chunks(self) -> list[ChunkReads]:
        """Return the chunks that they take, of which nothing can be placed."""
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
    """Rows that are to be read first, since nothing is known of their lengths."""

    part: Part

    def read(self) -> "ArrivedRagged":
        """Read them.

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
    """Return the rows of a part, by what is known of them.

    Parameters
    ----------
    part
        Whose they are.
    dtype
        What values are cast to.
    """
    chunked = part.stored.chunked()
    if isinstance(chunked, RaggedChunks) and can_cast(chunked.dtype, dtype):
        return KnownRagged(part, chunked.lengths_of(expand(part.runs)), chunked)
    known = part.stored.row_lengths(part.runs)
    return ArrivingRagged(part) if known is None else KnownRagged(part, known)
