"""The read of an element in a fetch: where rows of each source lie, and where they go in memory.

The destinations of rows depend on their lengths. These are known for dense rows, and for sparse
rows that have row pointers and of which no column is left out. Otherwise they are found by a first
read, of column indices or, if cellfeed does not decode them, of rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from cellfeed._errors import FormatError, ParameterError
from cellfeed._runs import Runs, merge_consecutive
from cellfeed.decode import ChunkReads, Decoder, Extents, can_cast
from cellfeed.decode._placing import SelectedElements, place_elements
from cellfeed.rows import (
    Chunks,
    ColumnMap,
    Copies,
    CsrRows,
    DenseChunks,
    FoundRows,
    Group,
    Layout,
    RaggedRows,
    RowTarget,
    SparseChunks,
    lay_out,
)
from cellfeed.sources import Source, StoredElement
from cellfeed.sources._source import FoundCsr

Placement = Callable[[NDArray[np.int64]], bool]
"""Places rows in memory whose groups begin at the given addresses, in the calling thread; returns
whether the columns of each row ascend strictly."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """The rows of an element that come from one source, and how they are read.

    Parameters
    ----------
    source, stored
        The source, and its element.
    rows
        Its rows, ascending, int64, shape (n,).
    positions
        Positions of these rows among the distinct rows of the fetch: a range, or numbers.
    column_map
        New index of each column; None if its columns are those of the collection.
    lengths
        Number of elements in each row of the collection, int64, shape (n,); None if unknown before
        reading.
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

    source: Source
    stored: StoredElement
    rows: NDArray[np.int64]
    positions: slice | NDArray[np.intp]
    column_map: ColumnMap | None
    lengths: NDArray[np.int64] | None = None
    chunks: Chunks | None = None
    extents: Extents | None = None
    indices: ChunkReads | None = None
    selected: SelectedElements | None = None
    in_memory: Any = None

    @property
    def runs(self) -> Runs:
        """Runs of its rows, for sources that read these themselves."""
        return merge_consecutive(self.rows)

    @property
    def columns(self) -> NDArray[np.int32] | None:
        """New index of each column; None if columns do not change."""
        return (
            None
            if self.column_map is None or self.column_map.is_identity
            else self.column_map.columns
        )

    @property
    def keeps_all(self) -> bool:
        """Whether none of its columns is left out."""
        return self.column_map is None or self.column_map.keeps_all

    @property
    def expected_bytes(self) -> int:
        """Number of bytes that the source requests if these rows are prefetched."""
        return round(self.stored.expected_row_bytes * self.rows.size)

    @property
    def _planning(self) -> AbstractContextManager[object]:
        """The lock of the source; none if rows are requested while others are read."""
        return nullcontext() if self.stored.expected_row_bytes else self.source.reading

    def chunked(self) -> Chunks | None:
        """Return the chunks of the element; see `StoredElement.chunked`."""
        with self._planning:
            return self.stored.chunked()

    def row_lengths(self) -> NDArray[np.int64] | None:
        """Return the number of elements of each row, None if it is unknown before reading.

        Raises
        ------
        FormatError
            The source returned something else.
        """
        with self._planning:
            lengths = self.stored.row_lengths(self.runs)
        if lengths is None:
            return None
        lengths = np.asarray(lengths)
        if lengths.shape != (self.rows.size,) or lengths.dtype.kind not in "iu":
            raise self.wrong(f"lengths of shape {lengths.shape} and dtype {lengths.dtype}")
        if lengths.size and lengths.min() < 0:
            raise self.wrong(f"a row of length {lengths.min()}")
        return lengths.astype(np.int64, copy=False)

    def read_rows(self) -> Any:
        """Return the rows that the source reads itself, in the type of their layout.

        Raises
        ------
        FormatError
            The storage is damaged, or the source returned other rows.
        """
        with self.source.reading:
            rows, layout = self.stored.read_rows(self.runs), self.stored.layout
        if not isinstance(rows, _TYPES[layout]):
            raise self.wrong(f"{type(rows).__name__} for an element of layout {layout!r}")
        expected = (self.rows.size, *self.stored.shape[1:])
        if self.stored.stored_columns is not None:
            expected = (expected[0], self.stored.stored_columns.size)
        if rows.shape != expected:
            raise self.wrong(f"shape {rows.shape}, but {expected} expected")
        if isinstance(rows, CsrRows):
            self._check_pointers(rows.indptr, rows.indices, rows.data)
            if rows.indices.dtype.kind not in "iu":
                raise self.wrong(f"column indices of dtype {rows.indices.dtype}")
        elif isinstance(rows, RaggedRows):
            self._check_pointers(rows.offsets, rows.values)
        return rows

    def _check_pointers(self, pointers: NDArray[Any], *arrays: NDArray[Any]) -> None:
        """Check that rows are divided as their arrays are long."""
        for each in arrays:
            if each.shape != (pointers[-1],):
                raise self.wrong(f"an array of shape {each.shape} for {pointers[-1]} elements")
        if pointers[0] != 0 or np.any(pointers[1:] < pointers[:-1]):
            raise self.wrong("row pointers that do not ascend from 0")

    def with_columns(self, rows: Any) -> Any:
        """Return sparse or dense rows that were read with the columns of the collection.

        Columns that the source lacks are zero.

        Raises
        ------
        FormatError
            The rows do not match the source's description.
        """
        if self.column_map is None or self.column_map.is_identity:
            return rows
        columns, n_columns = self.column_map.columns, self.column_map.n_columns
        if isinstance(rows, CsrRows):
            with self.wrong_rows():
                return rows.with_columns(columns, n_columns)
        joined = np.zeros((len(rows), n_columns), rows.dtype)
        are_kept = columns >= 0
        joined[:, columns[are_kept]] = rows.reshape(len(rows), columns.size)[:, are_kept]
        return joined

    @contextmanager
    def wrong_rows(self) -> Iterator[None]:
        """Say of a `ValueError` that the rows do not match the source's description."""
        try:
            yield
        except ValueError as error:
            raise self.wrong(error) from error

    def wrong(self, what: object) -> FormatError:
        """Return the error for rows that do not match the source's description."""
        msg = (
            f"{self.source.location}: `{type(self.stored).__name__}` returned wrong rows: {what}; "
            "the storage may be damaged"
        )
        return FormatError(msg)

    def planned(self, layout: Layout, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> Self:
        """Return the same rows with how they are read, in an element that is delivered as a dtype.

        Parameters
        ----------
        layout, row_shape, dtype
            See `ElementRead`.
        """
        chunks, rows = self.chunked(), self.rows
        if chunks is None or chunks.layout != layout or not can_cast(chunks.dtype, dtype):
            chunks = None
        if layout == "dense":
            lengths = np.full(rows.size, math.prod(row_shape), np.int64)
            return replace(self, lengths=lengths, chunks=chunks)
        if chunks is None:
            return replace(self, lengths=self.row_lengths() if self.keeps_all else None)
        if not isinstance(chunks, SparseChunks):
            return replace(self, lengths=chunks.lengths_of(rows), chunks=chunks)
        extents = chunks.extents(rows)
        if self.columns is None or self.keeps_all:
            return replace(self, lengths=extents.lengths, chunks=chunks, extents=extents)
        indices = chunks.indices.reads_selecting(
            extents.in_indices, extents.counts, column_map=self.columns
        )
        return replace(self, chunks=chunks, extents=extents, indices=indices)

    def announced(self) -> list[ChunkReads]:
        """Return the chunks that the rows may need, for reading without placing."""
        if self.chunks is None:
            return []
        nowhere = np.zeros(self.rows.size, np.int64)
        dtypes = [np.dtype(np.int32), self.chunks.dtype]
        target = RowTarget(lengths=nowhere, destinations=[nowhere, nowhere], dtypes=dtypes)
        reads, _ = self.reads_and_placements(target)
        return reads if self.indices is None else [self.indices, reads[-1]]

    def found(self, decoder: Decoder) -> Self:
        """Return the same rows after reading them, since their lengths are unknown.

        Raises
        ------
        FormatError
            The storage is damaged.
        """
        stored = self.stored
        if stored.layout == "ragged":
            ragged = self.read_rows()
            return replace(self, lengths=ragged.lengths, in_memory=ragged)
        rows: Any
        if isinstance(stored, FoundCsr) and self.columns is None:
            with self.source.reading:
                rows = stored.find_rows(self.runs)
            return replace(self, lengths=rows.lengths, in_memory=rows)
        rows = _dense_as_csr(self, decoder) if stored.layout == "dense" else self.read_rows()
        rows = self.with_columns(rows)
        return replace(self, lengths=np.diff(rows.indptr).astype(np.int64), in_memory=rows)

    def with_selected(self, selected: SelectedElements) -> Self:
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
        chunks, extents = self.chunks, self.extents
        if chunks is None:
            return [], [partial(_place, self, target)]
        if isinstance(chunks, DenseChunks):
            first = target.destinations[0]
            return [chunks.reads(self.rows, first, target.dtype, self.columns)], []
        if not isinstance(chunks, SparseChunks):
            return [chunks.reads(self.rows, target.destinations[0], target.dtype)], []
        assert extents is not None  # noqa: S101 - of sparse chunks
        if self.selected is None:
            return chunks.reads(extents, target, self.columns), []
        reads = chunks.data.reads_of_selected(
            extents.firsts,
            self.selected,
            extents.destinations(target.destinations[-1], target.dtype.itemsize),
            target.dtype,
        )
        return [reads], [partial(_place_columns, self.selected, extents, target)]


_TYPES = {"csr": CsrRows, "dense": np.ndarray, "ragged": RaggedRows}


def _place(part: Part, target: RowTarget, bases: NDArray[np.int64]) -> bool:
    """Place the rows of a part in memory, after reading them if they are not; see `Placement`."""
    rows, bound = part.in_memory, target.bound(bases)
    if isinstance(rows, FoundRows):
        return rows.put(bound)
    if rows is None:
        rows = part.with_columns(part.read_rows())
    with part.wrong_rows():
        return bound.put(rows)


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
    parts
        The distinct rows, by source.
    groups
        The groups of rows that result; None while some lengths are unknown, as are those below.
    reads
        Chunks to decode.
    placements
        Rows that are placed in another way.
    copies
        Rows that are delivered again.
    """

    layout: Layout
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: NDArray[np.intp]
    bounds: NDArray[np.int64]
    first_number: int
    parts: Sequence[Part]
    groups: Sequence[Group] | None = None
    reads: Sequence[ChunkReads] = ()
    placements: Sequence[Placement] = ()
    copies: Sequence[Copies] = ()

    @property
    def chunks(self) -> Sequence[ChunkReads]:
        """Chunks that it may need, to be read and decompressed without being placed."""
        if self.groups is None:
            return [reads for part in self.parts for reads in part.announced()]
        return self.reads

    @property
    def are_whole(self) -> bool:
        """Whether each row is decoded from one chunk."""
        return not self.placements and all(each.are_whole for each in self.reads)

    @property
    def is_decoded_here(self) -> bool:
        """Whether these chunks are all that is read."""
        return all(part.chunks is not None for part in self.parts)

    @property
    def is_zeroed(self) -> bool:
        """Whether the memory must be zero before, since some columns are in no source."""
        maps = [part.column_map for part in self.parts]
        return self.layout == "dense" and not all(each is None or each.covers for each in maps)

    def laid_out(self, decoder: Decoder, selections: "Selections") -> "ElementRead":
        """Return the same read with groups, after reading what unknown lengths depend on.

        Parameters
        ----------
        decoder
            The decoder.
        selections
            What other elements have selected of the same rows, to which this adds.

        Raises
        ------
        FormatError
            The storage is damaged.
        ParameterError
            The rows are larger than the machine's memory.
        """
        if self.groups is not None:
            return self
        parts = [*_with_lengths(self.parts, decoder, selections)]
        of_parts = [(part, part.lengths) for part in parts if part.lengths is not None]
        lengths = np.empty(sum(own.size for _, own in of_parts), np.int64)
        for part, own in of_parts:
            lengths[part.positions] = own
        # Before destinations are computed, which could overflow.
        n_bytes = float(lengths[self.order].sum(dtype=np.float64)) * self.dtype.itemsize
        if n_bytes > _all_memory():
            msg = (
                f"these rows take {n_bytes:,.0f} bytes, but this machine has {_all_memory():,} "
                "bytes of memory; read fewer at a time or, if they should be small, copy the "
                "files again"
            )
            raise ParameterError(msg)
        groups, target, copies = lay_out(
            self.layout,
            lengths,
            self.order,
            self.bounds,
            row_shape=self.row_shape,
            dtype=self.dtype,
            first_number=self.first_number,
        )
        reads, placements = list[ChunkReads](), list[Placement]()
        for part in parts:
            of_part = part.reads_and_placements(target[part.positions])
            reads, placements = reads + of_part[0], placements + of_part[1]
        return replace(self, groups=groups, reads=reads, placements=placements, copies=copies)


Selections = dict[tuple[int, int], SelectedElements]
"""Selected elements of rows, by the identities of the array of column indices and of the columns:
elements that share column indices select the same."""


def _with_lengths(
    parts: Sequence[Part], decoder: Decoder, selections: Selections
) -> Iterator[Part]:
    """Yield the same parts, in another order, after reading what their lengths depend on."""
    selecting = list[tuple[Part, ChunkReads, NDArray[np.int64]]]()
    for each in parts:
        if each.lengths is not None:
            yield each
        elif each.indices is None or each.extents is None:
            yield each.found(decoder)
        elif (selected := selections.get(_selection(each))) is not None:
            yield each.with_selected(selected)
        else:
            selecting.append((each, each.indices, each.extents.counts))
    if not selecting:
        return
    # Of all parts together, so that threads do not wait for each other in between.
    counts = [counts for *_, counts in selecting]
    reads = ChunkReads.concatenate([indices for _, indices, _ in selecting])
    all_selected = reads.select(np.concatenate(counts), decoder)
    bounds = accumulate((each.size for each in counts), initial=0)
    for (part, *_), (begin, end) in zip(selecting, pairwise(bounds), strict=True):
        own = selections[_selection(part)] = all_selected[begin:end]
        yield part.with_selected(own)


def _selection(part: Part) -> tuple[int, int]:
    assert isinstance(part.chunks, SparseChunks)  # noqa: S101 - of which elements are selected
    return id(part.chunks.indices), id(part.columns)


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
        is_stored = dense != 0
        at = np.flatnonzero(is_stored)
        columns = at % max(1, n_columns)
        found.append((is_stored.sum(axis=1), columns, dense.reshape(-1)[at]))
    lengths, columns, values = (np.concatenate(each) for each in zip(*found, strict=True))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return CsrRows(indptr, columns, values, n_columns)
