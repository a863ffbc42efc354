"""What one fetch reads of one element, laid out before it is read or once lengths have arrived.

Where rows go follows from their lengths. Those of dense rows are known, and those of sparse rows
if they have a row pointer and no column is left out. Else a first reading tells them.
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

from cellfeed._chunks import ChunkReads, Decoder, ValueSteps
from cellfeed._errors import ParameterError
from cellfeed._layouts import (
    Copies,
    DenseChunks,
    Group,
    csr_groups,
    dense_groups,
    ragged_groups,
)
from cellfeed._reading._direct_rows import DirectRows
from cellfeed._reading._parts import Part, PlacedRows, StoredRows
from cellfeed._reading._pieced_rows import PiecedRows, SelectedPieces
from cellfeed._reading._ragged_rows import (
    ArrivingRagged,
    KnownRagged,
    RaggedPart,
    ragged_part,
)
from cellfeed._reading._sparse_rows import (
    ArrivingRows,
    KnownRows,
    SelectedRows,
    SparseRows,
    sparse_rows,
)

__all__ = ["ElementPlan", "ElementRead", "LaidOut"]

_Known = KnownRows | PiecedRows
_Selected = SelectedRows | SelectedPieces

_MOST_SELECTED = 1 << 27  # elements at once: a list of them takes 1 GiB if all are kept


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOut:
    """Rows of an element whose destinations are known.

    Parameters
    ----------
    groups
        What comes of them.
    reads
        Chunks that are to be decoded.
    placed
        Rows that are not placed by that.
    direct
        Rows that a library decodes to where they go.
    copies
        Rows that are delivered again.
    is_zeroed
        Whether memory has to be zero before.
    as_stored
        Positions in the order of delivery of rows that did not go through the plan's steps, shape
        (n,); all of them if None.
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
        """Whether all rows went through the plan's steps on their way."""
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
    """What a fetch reads of an element."""

    @property
    def chunks(self) -> Sequence[ChunkReads]:
        """Chunks that it may take, which can be read and decompressed without being placed."""
        ...

    @property
    def is_decoded_here(self) -> bool:
        """Whether these are all."""
        ...

    @property
    def arriving_parts(self) -> Sequence[Part]:
        """Rows that are still to be read by their sources."""
        ...

    def lay_out(self, decoder: Decoder) -> LaidOut:
        """Read what lengths follow from, if they are not known, and lay the rows out.

        Parameters
        ----------
        decoder
            Who decodes.

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
    """How the rows of an element leave.

    Parameters
    ----------
    n_distinct
        Distinct rows of the fetch.
    order
        Which of them is delivered at each position, shape (n_delivered,); each at least once.
    bounds
        Positions where groups begin and end, ascending, shape (n_groups + 1,).
    row_shape, dtype
        Shape of a row in the collection, and dtype that values are cast to.
    first_number
        Number of the first group among all that memory is taken for.
    steps
        What values of sparse rows go through on their way where that can be.
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
        """Values of a dense row."""
        return math.prod(self.row_shape)

    def dense(self, parts: Sequence[Part]) -> ElementRead:
        """Plan to read dense rows.

        Parameters
        ----------
        parts
            The rows, in their order.

        Raises
        ------
        FormatError
            A file is damaged, or is not the one that was opened.
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
        """Lay out sparse rows, in whatever order they are given."""
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
        """Lay out rows of any length, in whatever order they are given."""
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
        """Check that rows are not larger than all memory, before destinations are computed."""
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
    """Sparse rows, of which some are to be read before they can be laid out."""

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
        """Return where those that are selected together begin and end."""
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
    """Rows of any length, of which some are to be read before they can be laid out."""

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
