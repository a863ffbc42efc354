"""The read of one element in a fetch: where its rows lie in storage, and where they go in memory.

The destinations of rows depend on their lengths. These are known for dense rows, and for sparse
rows that have row pointers and of which no column is left out. Otherwise they are found by a first
read, of column indices or, if cellfeed does not decode them, of rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed.decode import ChunkReads, Decoder, Extents, can_cast
from cellfeed.decode._placing import SelectedElements, place_elements
from cellfeed.fetch._parts import Part
from cellfeed.rows import (
    Chunks,
    Copies,
    CsrRows,
    DenseChunks,
    FoundRows,
    Group,
    Layout,
    RowTarget,
    SparseChunks,
    lay_out,
)
from cellfeed.sources._source import FoundCsr

_MOST_SELECTED = 1 << 27  # elements at once: a list of them takes 1 GiB if all are selected

Placement = Callable[[NDArray[np.int64]], bool]
"""Places rows in memory whose groups begin at the given addresses, in the calling thread; returns
whether the columns of each row ascend strictly."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PartRows:
    """The rows of one source, and how they are read.

    Parameters
    ----------
    part
        The part.
    lengths
        Number of elements in each row of the collection, int64, shape (n_rows,); None if unknown
        before reading.
    chunks, extents
        The chunks of the rows, and where sparse rows lie in them; None if a library reads the rows.
    indices
        The reads of column indices that lengths depend on, since some columns are left out.
    selected
        The selected elements of each extent, once these have been read.
    in_memory
        The rows themselves, with the columns of the collection, if lengths depended on these; or
        rows that are decoded to their destinations, `FoundRows`.
    """

    part: Part
    lengths: NDArray[np.int64] | None
    chunks: Chunks | None = None
    extents: Extents | None = None
    indices: ChunkReads | None = None
    selected: SelectedElements | None = None
    in_memory: Any = None

    @staticmethod
    def of(part: Part, layout: Layout, row_shape: tuple[int, ...], dtype: Any) -> "PartRows":
        """Return the rows of a part, in an element of a layout that is delivered as a dtype."""
        chunks, rows = part.chunked(), part.rows
        if chunks is None or chunks.layout != layout or not can_cast(chunks.dtype, dtype):
            chunks = None
        if layout == "dense":
            lengths = np.full(rows.size, math.prod(row_shape), np.int64)
            return PartRows(part=part, lengths=lengths, chunks=chunks)
        if chunks is None:
            known = part.row_lengths() if part.keeps_all else None
            return PartRows(part=part, lengths=known)
        if not isinstance(chunks, SparseChunks):
            return PartRows(part=part, lengths=chunks.lengths_of(rows), chunks=chunks)
        extents = chunks.extents(rows)
        if part.columns is None or part.keeps_all:
            return PartRows(part=part, lengths=extents.lengths, chunks=chunks, extents=extents)
        indices = chunks.indices.reads_selecting(
            extents.in_indices, extents.counts, column_map=part.columns
        )
        return PartRows(part=part, lengths=None, chunks=chunks, extents=extents, indices=indices)

    @property
    def are_library_read(self) -> bool:
        """Whether a library still has to read them."""
        return self.chunks is None and self.in_memory is None

    def announced(self) -> list[ChunkReads]:
        """Return the chunks that the rows may need, for reading without placing."""
        if self.chunks is None:
            return []
        nowhere = np.zeros(self.part.rows.size, np.int64)
        dtypes = [np.dtype(np.int32), self.chunks.dtype]
        target = RowTarget(lengths=nowhere, destinations=[nowhere, nowhere], dtypes=dtypes)
        reads, _ = self.reads_and_placements(target)
        return reads if self.indices is None else [self.indices, reads[-1]]

    def read(self, decoder: Decoder) -> "PartRows":
        """Return the same rows after reading them, since their lengths are unknown.

        Raises
        ------
        FormatError
            The storage is damaged.
        """
        part, stored = self.part, self.part.stored
        if stored.layout == "ragged":
            ragged = part.read_rows()
            return replace(self, lengths=ragged.lengths, in_memory=ragged)
        rows: Any
        if isinstance(stored, FoundCsr) and part.columns is None:
            with part.source.reading:
                found = stored.find_rows(part.runs)
            return replace(self, lengths=found.lengths, in_memory=found)
        rows = _dense_as_csr(part, decoder) if stored.layout == "dense" else part.read_rows()
        rows = part.with_columns(rows)
        return replace(self, lengths=np.diff(rows.indptr).astype(np.int64), in_memory=rows)

    def with_selected(self, selected: SelectedElements) -> "PartRows":
        """Return the same rows with the selected elements of each extent."""
        assert self.extents is not None  # noqa: S101 - of sparse chunks
        extents = self.extents.selected(selected.lengths)
        return replace(self, lengths=extents.lengths, extents=extents, selected=selected)

    def reads_and_placements(self, target: RowTarget) -> tuple[list[ChunkReads], list[Placement]]:
        """Return the reads of chunks, and the rows that are placed in another way.

        Parameters
        ----------
        target
            Destinations of the rows.
        """
        part, chunks, extents = self.part, self.chunks, self.extents
        if chunks is None:
            return [], [partial(_place, part, self.in_memory, target)]
        if isinstance(chunks, DenseChunks):
            first = target.destinations[0]
            return [chunks.reads(part.rows, first, target.dtype, part.columns)], []
        if not isinstance(chunks, SparseChunks):
            return [chunks.reads(part.rows, target.destinations[0], target.dtype)], []
        assert extents is not None  # noqa: S101 - of sparse chunks
        if self.selected is None:
            return chunks.reads(extents, target, part.columns), []
        reads = chunks.data.reads_of_selected(
            extents.firsts,
            self.selected,
            extents.destinations(target.destinations[-1], target.dtype.itemsize),
            target.dtype,
        )
        return [reads], [partial(_place_columns, self.selected, extents, target)]


def _place(part: Part, rows: Any, target: RowTarget, bases: NDArray[np.int64]) -> bool:
    """Place rows in memory; the rows of a part that are None are read; see `Placement`."""
    if isinstance(rows, FoundRows):
        return rows.put(target.bound(bases))
    if rows is None:
        rows = part.with_columns(part.read_rows())
    with part.wrong_rows():
        return target.bound(bases).put(rows)


def _place_columns(
    selected: SelectedElements, extents: Extents, target: RowTarget, bases: NDArray[np.int64]
) -> bool:
    """Place the columns of selected elements, whose values are decoded; see `Placement`."""
    dtype = target.dtypes[0]
    place_elements(
        selected.columns,
        selected.starts[:-1],
        selected.lengths,
        extents.destinations(target.bound(bases).destinations[0], dtype.itemsize),
        dtype,
    )
    if extents.rows is None:
        return selected.ascending
    order = extents.row_order
    filled = order[selected.lengths[order] > 0]
    goes_on = extents.rows[filled[1:]] == extents.rows[filled[:-1]]
    last = selected.columns[selected.starts[filled[:-1] + 1] - 1]
    ascend = selected.columns[selected.starts[filled[1:]]] > last
    return selected.ascending and bool(ascend[goes_on].all())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowLayout:
    """The groups of an element whose destinations are known, and the reads that fill them.

    Parameters
    ----------
    groups
        The groups of rows that result.
    reads
        Chunks to decode.
    placed
        Rows that are placed in another way.
    copies
        Rows that are delivered again.
    is_zeroed
        Whether the memory must be zero before.
    """

    groups: Sequence[Group]
    reads: Sequence[ChunkReads]
    placed: Sequence[Placement]
    copies: Sequence[Copies]
    is_zeroed: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ElementRead:
    """The read of an element for a fetch.

    Parameters
    ----------
    layout, row_shape, dtype
        Layout, shape of a row in the collection, and dtype to which values are cast.
    order
        The row that is delivered at each position, shape (n_delivered,); each at least once.
    bounds
        Positions where groups begin and end, ascending, shape (n_groups + 1,).
    first_number
        Number of the first group among all groups of the fetch.
    rows
        The distinct rows, by source.
    row_layout
        Their layout; None while some lengths are unknown.
    """

    layout: Layout
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: NDArray[np.intp]
    bounds: NDArray[np.int64]
    first_number: int
    rows: Sequence[PartRows]
    row_layout: RowLayout | None = None

    @property
    def chunks(self) -> Sequence[ChunkReads]:
        """Chunks that it may need, to be read and decompressed without being placed."""
        if self.row_layout is None:
            return [reads for rows in self.rows for reads in rows.announced()]
        return self.row_layout.reads

    @property
    def is_decoded_here(self) -> bool:
        """Whether these chunks are all that is read."""
        return all(rows.chunks is not None for rows in self.rows)

    @property
    def library_parts(self) -> Sequence[Part]:
        """Rows that their sources still have to read."""
        return [rows.part for rows in self.rows if rows.are_library_read]

    @property
    def is_known(self) -> bool:
        """Whether all lengths are known."""
        return all(each.lengths is not None for each in self.rows)

    def with_layout(self, decoder: Decoder, selection_cache: "Selections") -> "ElementRead":
        """Return the same read with its layout; see `find_layout`."""
        return replace(self, row_layout=self.find_layout(decoder, selection_cache))

    def find_layout(self, decoder: Decoder, selection_cache: "Selections") -> RowLayout:
        """Return the layout, after reading what unknown lengths depend on.

        Parameters
        ----------
        decoder
            The decoder.
        selection_cache
            What other elements have selected of the same rows, to which this adds.

        Raises
        ------
        FormatError
            The storage is damaged.
        ParameterError
            The rows are larger than the machine's memory.
        """
        if self.row_layout is not None:
            return self.row_layout
        rows = [*_with_lengths(self.rows, decoder, selection_cache)]
        of_parts = [(each, each.lengths) for each in rows if each.lengths is not None]
        lengths = np.empty(sum(of_part.size for _, of_part in of_parts), np.int64)
        for each, of_part in of_parts:
            lengths[each.part.positions] = of_part
        self._check_fit(float(lengths[self.order].sum(dtype=np.float64)))
        groups, target, copies = lay_out(
            self.layout,
            lengths,
            self.order,
            self.bounds,
            row_shape=self.row_shape,
            dtype=self.dtype,
            first_number=self.first_number,
        )
        reads, placed = list[ChunkReads](), list[Placement]()
        for each in rows:
            own = each.reads_and_placements(target[each.part.positions])
            reads, placed = reads + own[0], placed + own[1]
        maps = [each.part.column_map for each in rows]
        lack_columns = not all(each is None or each.covers for each in maps)
        return RowLayout(
            groups=groups,
            reads=reads,
            placed=placed,
            copies=copies,
            is_zeroed=self.layout == "dense" and lack_columns,
        )

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


Selections = dict[tuple[int, int], SelectedElements]
"""Selected elements of rows, by the identities of the array of column indices and of the columns:
elements that share column indices select the same."""


def _with_lengths(
    rows: Sequence[PartRows], decoder: Decoder, selection_cache: Selections
) -> Iterator[PartRows]:
    """Yield the same rows, in another order, after reading what their lengths depend on."""
    yield from (each for each in rows if each.lengths is not None)
    batch, n_elements = list[tuple[PartRows, ChunkReads, NDArray[np.int64]]](), 0
    for each in rows:
        if each.indices is None or each.extents is None:
            continue
        if (found := selection_cache.get(_selection(each))) is not None:
            yield each.with_selected(found)
            continue
        counts = each.extents.counts
        n = int(counts.sum())
        if n_elements and n_elements + n > _MOST_SELECTED:
            yield from _selected(batch, decoder, selection_cache)
            batch, n_elements = [], 0
        batch.append((each, each.indices, counts))
        n_elements += n
    yield from _selected(batch, decoder, selection_cache)
    for each in rows:
        if each.lengths is None and each.indices is None:
            yield each.read(decoder)


def _selected(
    batch: Sequence[tuple[PartRows, ChunkReads, NDArray[np.int64]]],
    decoder: Decoder,
    selection_cache: Selections,
) -> Iterator[PartRows]:
    """Select elements of several rows together."""
    if not batch:
        return
    counts = [counts for _, _, counts in batch]
    reads = ChunkReads.concatenate([indices for _, indices, _ in batch])
    selected = reads.select(np.concatenate(counts), decoder)
    bounds = accumulate((each.size for each in counts), initial=0)
    for (rows, _, _), (begin, end) in zip(batch, pairwise(bounds), strict=True):
        own = selection_cache[_selection(rows)] = selected[begin:end]
        yield rows.with_selected(own)


def _selection(rows: PartRows) -> tuple[int, int]:
    assert isinstance(rows.chunks, SparseChunks)  # noqa: S101 - of which elements are selected
    return id(rows.chunks.indices), id(rows.part.columns)


@cache
def _all_memory() -> int:
    return int(psutil.virtual_memory().total)


# Dense rows of one source in a collection that is sparse.

_BATCH_BYTES = 1 << 25  # of dense rows at once


def _dense_as_csr(part: Part, decoder: Decoder) -> CsrRows:
    """Read dense rows, and return their non-zeros.

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
    n_columns, dtype = part.stored.shape[1], part.stored.dtype
    row_bytes, chunks = n_columns * dtype.itemsize, part.chunked()
    step, found = max(1, _BATCH_BYTES // max(1, row_bytes)), list[tuple[NDArray[Any], ...]]()
    for first in range(0, part.rows.size, step):
        rows = part.rows[first : first + step]
        if isinstance(chunks, DenseChunks) and can_cast(chunks.dtype, dtype):
            dense = np.empty((rows.size, n_columns), dtype)
            reads = chunks.reads(rows, np.arange(rows.size) * row_bytes, dtype)
            reads.run(np.array([dense.ctypes.data], np.int64), decoder)
        else:
            dense = replace(part, rows=rows).read_rows()
        found.append(_nonzero(dense))
    lengths, columns, values = (np.concatenate(each) for each in zip(*found, strict=True))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return CsrRows(indptr, columns, values, n_columns)


def _nonzero(dense: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the number of non-zeros of each row, their columns, and their values."""
    is_stored = dense != 0
    elements = np.flatnonzero(is_stored)
    columns = elements % max(1, dense.shape[1])
    return is_stored.sum(axis=1), columns, dense.reshape(-1)[elements]
