"""The layout of a fetch's rows of one element, before reading or once their lengths are known.

The destinations of rows depend on their lengths. These are known for dense rows, and for sparse
rows that have row pointers and keep all columns. Otherwise they are found by a first read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from cellfeed._decode import ChunkReads, Decoder, ValueSteps
from cellfeed._errors import ParameterError
from cellfeed._fetch._direct_rows import DirectRows
from cellfeed._fetch._parts import Part, PlacedRows, StoredRows
from cellfeed._fetch._sparse_rows import (
    ArrivingRagged,
    ArrivingRows,
    KnownRagged,
    KnownRows,
    PiecedRows,
    RaggedPart,
    SelectedPieces,
    SelectedRows,
    SparseRows,
    ragged_part,
    sparse_rows,
)
from cellfeed._rows import Copies, DenseChunks, Group, csr_groups, dense_groups, ragged_groups

_Known = KnownRows | PiecedRows
_Selected = SelectedRows | SelectedPieces

_MOST_SELECTED = 1 << 27  # elements at once: a list of them takes 1 GiB if all are kept


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOut:
    """Rows of an element whose destinations are known.

    Parameters
    ----------
    groups
        The groups of rows that result.
    reads
        Chunks to decode.
    placed
        Rows that are placed in another way.
    direct
        Rows that a library decodes to their destinations.
    copies
        Rows that are delivered again.
    is_zeroed
        Whether the memory must be zero before.
    as_stored
        Positions, in the order of delivery, of rows to which the plan's steps were not applied,
        shape (n,); all positions if None.
    """

    groups: Sequence[Group]
    reads: Sequence[ChunkReads]
    placed: Sequence[PlacedRows]
    copies: Sequence[Copies]
    direct: Sequence[DirectRows] = ()
    is_zeroed: bool = False
    as_stored: NDArray[np.intp] | None = None

    @property
    def went_through(self) -> bool:
        """Whether the plan's steps were applied to all rows while they were placed."""
        return self.as_stored is not None and self.as_stored.size == 0

    @property
    def chunks(self) -> Sequence[ChunkReads]:
        """See `ElementRead`."""
        return [*self.reads, *(each.announced for each in self.direct)]

    @property
    def is_decoded_here(self) -> bool:
        """See `ElementRead`."""
        return not self.placed and not self.direct

    @property
    def arriving_parts(self) -> Sequence[Part]:
        """See `ElementRead`."""
        return [each.part for each in self.placed if isinstance(each, StoredRows)]

    def lay_out(self, decoder: Decoder) -> "LaidOut":  # noqa: ARG002 - of the protocol
        """See `ElementRead`."""
        return self


class ElementRead(Protocol):
    """The read of an element for a fetch."""

    @property
    def chunks(self) -> Sequence[ChunkReads]:
        """Chunks that it may need, to be read and decompressed without being placed."""
        ...

    @property
    def is_decoded_here(self) -> bool:
        """Whether these chunks are all that is read."""
        ...

    @property
    def arriving_parts(self) -> Sequence[Part]:
        """Rows that their sources still have to read."""
        ...

    def lay_out(self, decoder: Decoder) -> LaidOut:
        """Find the lengths of rows, by reading if needed, and lay the rows out.

        Parameters
        ----------
        decoder
            The decoder.

        Raises
        ------
        FormatError
            The storage is damaged.
        ParameterError
            The rows are larger than the machine's memory.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ElementPlan:
    """How the rows of an element are delivered.

    Parameters
    ----------
    n_distinct
        Number of distinct rows in the fetch.
    order
        The row that is delivered at each position, shape (n_delivered,); each at least once.
    bounds
        Positions where groups begin and end, ascending, shape (n_groups + 1,).
    row_shape, dtype
        Shape of a row in the collection, and dtype to which values are cast.
    first_number
        Number of the first group among all groups of the fetch.
    steps
        Transforms of sparse values, applied while they are placed if possible.
    """

    n_distinct: int
    order: NDArray[np.intp]
    bounds: NDArray[np.int64]
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    first_number: int
    steps: ValueSteps | None = None

    @property
    def n_columns(self) -> int:
        """Number of values in a dense row."""
        return math.prod(self.row_shape)

    def dense(self, parts: Sequence[Part]) -> ElementRead:
        """Plan to read dense rows.

        Parameters
        ----------
        parts
            The rows, in order.

        Raises
        ------
        FormatError
            A file is damaged, or was replaced since it was opened.
        ParameterError
            The rows are larger than the machine's memory.
        """
        self._check_fit(float(self.order.size) * self.n_columns)
        groups, target, copies = dense_groups(
            self.n_distinct,
            self.order,
            self.bounds,
            row_shape=self.row_shape,
            dtype=self.dtype,
            first_number=self.first_number,
        )
        reads, placed = list[ChunkReads](), list[PlacedRows]()
        for part in parts:
            own, chunked = target[part.rows], part.stored.chunked()
            found = None
            if isinstance(chunked, DenseChunks):
                found = own.reads_from(chunked, part.runs, part.columns)
            if found is None:
                placed.append(StoredRows(part, own))
            else:
                reads.append(found)
        return LaidOut(
            groups=groups,
            reads=reads,
            placed=placed,
            copies=copies,
            is_zeroed=not all(part.column_map is None or part.column_map.covers for part in parts),
        )

    def csr(self, parts: Sequence[Part]) -> ElementRead:
        """Plan to read sparse rows; see `dense`."""
        known, selected, arriving = list[_Known](), list[_Selected](), list[ArrivingRows]()
        for part in parts:
            rows = sparse_rows(part, self.dtype)
            if isinstance(rows, _Selected):
                selected.append(rows)
            elif isinstance(rows, ArrivingRows):
                arriving.append(rows)
            else:
                known.append(rows)
        if selected or arriving:
            return _Arriving(self, known, selected, arriving)
        return self.laid_out(known)

    def laid_out(self, rows: Sequence[SparseRows]) -> LaidOut:
        """Lay out sparse rows, given in any order."""
        lengths = np.empty(self.n_distinct, np.int64)
        for each in rows:
            lengths[each.part.rows] = each.lengths
        self._check_fit(float(lengths[self.order].sum(dtype=np.float64)))
        groups, target, copies = csr_groups(
            lengths,
            self.order,
            self.bounds,
            n_vars=self.n_columns,
            dtype=self.dtype,
            first_number=self.first_number,
        )
        reads, placed = list[ChunkReads](), list[PlacedRows | DirectRows]()
        for each in rows:
            decoded, others = each.to(target[each.part.rows], self.steps)
            reads += decoded
            placed += others
        as_stored = None
        if self.steps is not None:
            go_through = np.empty(self.n_distinct, np.bool_)
            for each in rows:
                go_through[each.part.rows] = each.go_through
            as_stored = np.flatnonzero(~go_through[self.order])
        return LaidOut(
            groups=groups,
            reads=reads,
            placed=[each for each in placed if not isinstance(each, DirectRows)],
            copies=copies,
            direct=[each for each in placed if isinstance(each, DirectRows)],
            as_stored=as_stored,
        )

    def ragged(self, parts: Sequence[Part]) -> ElementRead:
        """Plan to read rows of any length; see `dense`."""
        rows = [ragged_part(part, self.dtype) for part in parts]
        known = [each for each in rows if isinstance(each, KnownRagged)]
        arriving = [each for each in rows if isinstance(each, ArrivingRagged)]
        return _ArrivingRagged(self, known, arriving) if arriving else self.laid_out_ragged(known)

    def laid_out_ragged(self, rows: Sequence[RaggedPart]) -> LaidOut:
        """Lay out rows of any length, given in any order."""
        lengths = np.empty(self.n_distinct, np.int64)
        for each in rows:
            lengths[each.part.rows] = each.lengths
        self._check_fit(float(lengths[self.order].sum(dtype=np.float64)))
        groups, target, copies = ragged_groups(
            lengths, self.order, self.bounds, dtype=self.dtype, first_number=self.first_number
        )
        reads, placed = list[ChunkReads](), list[PlacedRows]()
        for each in rows:
            found = each.to(target[each.part.rows])
            if isinstance(found, ChunkReads):
                reads.append(found)
            else:
                placed.append(found)
        return LaidOut(groups=groups, reads=reads, placed=placed, copies=copies)

    def _check_fit(self, n_values: float) -> None:
        """Check that rows fit into the machine's memory, before computing destinations."""
        n_bytes = n_values * self.dtype.itemsize
        if n_bytes > _all_memory():
            msg = (
                f"these rows take {n_bytes:,.0f} bytes, but this machine has {_all_memory():,} "
                "bytes of memory; read fewer at a time or, if they should be small, copy the "
                "files again"
            )
            raise ParameterError(msg)


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """Sparse rows, some of which must be read before they can be laid out."""

    plan: ElementPlan
    known: Sequence[_Known]
    selected: Sequence[_Selected]
    arriving: Sequence[ArrivingRows]

    @property
    def chunks(self) -> Sequence[ChunkReads]:
        """See `ElementRead`."""
        known = [reads for rows in self.known for reads in rows.chunks()]
        known += [reads for rows in self.selected for reads in rows.chunks()]
        return [*known, *(reads for rows in self.arriving for reads in rows.chunks())]

    @property
    def is_decoded_here(self) -> bool:
        """See `ElementRead`."""
        return not self.arriving and all(rows.chunked is not None for rows in self.known)

    @property
    def arriving_parts(self) -> Sequence[Part]:
        """See `ElementRead`."""
        known = [rows.part for rows in self.known if rows.chunked is None]
        return [*known, *(rows.part for rows in self.arriving)]

    def lay_out(self, decoder: Decoder) -> LaidOut:
        """See `ElementRead`."""
        rows = list[SparseRows](self.known)
        for first, stop in pairwise(self._batch_bounds()):
            batch = self.selected[first:stop]
            lengths = [each.stored_lengths for each in batch]
            reads = ChunkReads.concatenate([each.indices for each in batch])
            kept = reads.select(np.concatenate(lengths), decoder)
            bounds = accumulate((each.size for each in lengths), initial=0)
            for each, (begin, end) in zip(batch, pairwise(bounds), strict=True):
                rows.append(each.with_kept(kept[begin:end]))
        rows += [each.read(self.plan.n_columns, decoder) for each in self.arriving]
        return self.plan.laid_out(rows)

    def _batch_bounds(self) -> list[int]:
        """Return the bounds of batches that are selected together."""
        bounds, n_elements = [0], 0
        for k, each in enumerate(self.selected):
            n = int(each.stored_lengths.sum())
            if n_elements and n_elements + n > _MOST_SELECTED:
                bounds.append(k)
                n_elements = 0
            n_elements += n
        return [*bounds, len(self.selected)] if self.selected else []


@dataclass(frozen=True, slots=True, eq=False)
class _ArrivingRagged:
    """Rows of any length, some of which must be read before they can be laid out."""

    plan: ElementPlan
    known: Sequence[KnownRagged]
    arriving: Sequence[ArrivingRagged]
    is_decoded_here = False

    @property
    def chunks(self) -> Sequence[ChunkReads]:
        """See `ElementRead`."""
        return [reads for rows in self.known for reads in rows.chunks()]

    @property
    def arriving_parts(self) -> Sequence[Part]:
        """See `ElementRead`."""
        return [each.part for each in self.arriving]

    def lay_out(self, decoder: Decoder) -> LaidOut:  # noqa: ARG002 - of the protocol
        """See `ElementRead`."""
        return self.plan.laid_out_ragged([*self.known, *(each.read() for each in self.arriving)])


@cache
def _all_memory() -> int:
    return int(psutil.virtual_memory().total)
