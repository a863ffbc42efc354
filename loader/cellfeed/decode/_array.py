"""Stored arrays in chunks or byte ranges: their locations, and the reads for given elements."""

import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import require_one_of
from cellfeed.bytes import ByteStore
from cellfeed.decode import _kernels as kernels
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._codecs import LZ4, LZF, STORED, ZARR_CODECS
from cellfeed.decode._placing import (
    SelectedElements,
    array_row,
)
from cellfeed.decode._reads import ChunkReads, chunk_table

# Memory for records about chunks, shared with processes that are forked from this one.

_BLOCK_BYTES = 1 << 16  # arrays are many and small, and a process has few mappings


_lock, _free = threading.Lock(), np.empty(0, np.uint8)


def shared_zeros(n_bytes: int) -> NDArray[np.uint8]:
    """Return zeros, uint8, shape (n_bytes,), shared with processes that are forked later."""
    global _free  # noqa: PLW0603 - what is left of the last block
    with _lock:
        if n_bytes > _free.size:
            _free = np.frombuffer(mmap.mmap(-1, max(1, n_bytes, _BLOCK_BYTES)), np.uint8)
        taken, _free = _free[:n_bytes], _free[n_bytes:]
    return taken


def _enter_process() -> None:
    """Start a new block in a forked process, since its parent allocates from the last one."""
    global _lock, _free  # a thread that is gone may hold the lock
    _lock, _free = threading.Lock(), np.empty(0, np.uint8)


os.register_at_fork(after_in_child=_enter_process)


# The chunk grid of an array.

_LARGEST_BEYOND = 1 << 30  # bytes that a chunk, or a table, may take if its array takes less
_TABLE_BYTES = 16  # of one chunk: where it lies, and how large it is
_TWO = 2
_MOST_BYTES = (1 << 63) - 1  # which addresses count


def chunk_grid(shape: Sequence[int], chunk_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks along each dimension; those at the border may be partial.

    Examples
    --------
    >>> chunk_grid((10, 4), (3, 4))
    (4, 1)
    """
    return tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))


def holds_whole_rows(shape: Sequence[int], chunk_shape: Sequence[int]) -> bool:
    """Return whether chunks contain consecutive whole rows."""
    return tuple(shape[1:]) == tuple(chunk_shape[1:])


def in_two_dimensions(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with all dimensions after the first flattened into one.

    Examples
    --------
    >>> in_two_dimensions((10, 32, 32, 3)), in_two_dimensions((10,))
    ((10, 3072), (10,))
    """
    return tuple(shape) if len(shape) <= _TWO else (shape[0], math.prod(shape[1:]))


def check_grid(
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    itemsize: int,
    *,
    shard_shape: Sequence[int] | None = None,
) -> None:
    """Check that the metadata of an array are possible, before allocating memory for it.

    Chunks may extend beyond the array, since those at the border are stored whole, but the memory
    for one chunk, and for the table of all chunks, must be at most that of the array or 1 GiB.

    Parameters
    ----------
    shape, chunk_shape
        Shapes of the array and of a chunk; Python integers, which cannot overflow.
    itemsize
        Bytes per element.
    shard_shape
        Shape of a shard, a file with many chunks, if there are shards.

    Raises
    ------
    ValueError
        The metadata are impossible.

    Examples
    --------
    >>> check_grid((10, 4), (1000, 4), 4)
    >>> check_grid((10, 4), (1 << 32, 1 << 32), 4)
    Traceback (most recent call last):
    ValueError: chunks of shape (4294967296, 4294967296) take 73786976294838206464 bytes each, ...
    """
    n_bytes = math.prod(shape) * itemsize
    if any(n < 0 for n in shape) or n_bytes > _MOST_BYTES:
        raise ValueError(f"an array cannot have shape {tuple(shape)}")
    if n_bytes == 0:
        return
    for part in (chunk_shape, shard_shape or chunk_shape):
        if len(part) != len(shape) or any(n < 1 for n in part):
            raise ValueError(f"an array of shape {tuple(shape)} cannot have chunks of shape {part}")
    largest = max(n_bytes, _LARGEST_BEYOND)
    chunk_bytes = math.prod(chunk_shape) * itemsize
    if chunk_bytes > largest:
        msg = (
            f"chunks of shape {tuple(chunk_shape)} take {chunk_bytes} bytes each, "
            f"but the array of shape {tuple(shape)} only {n_bytes}"
        )
        raise ValueError(msg)
    n_chunks = math.prod(chunk_grid(shape, chunk_shape))
    if shard_shape is not None:
        if any(n % c for n, c in zip(shard_shape, chunk_shape, strict=True)):
            msg = (
                f"shards of shape {tuple(shard_shape)} are not a multiple of chunks of shape "
                f"{tuple(chunk_shape)}"
            )
            raise ValueError(msg)
        n_chunks = max(n_chunks, math.prod(chunk_grid(shard_shape, chunk_shape)))
    if n_chunks * _TABLE_BYTES > largest:
        msg = (
            f"the table of {n_chunks} chunks takes more bytes than the array of shape "
            f"{tuple(shape)}, which takes {n_bytes}"
        )
        raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Located:
    """Locations of chunks; each array is int64, shape (n,).

    Parameters
    ----------
    files
        Number of each chunk's file.
    offsets, sizes
        Position and size of each chunk in its file, in bytes.
    flags
        Sum of flags: 1, the chunk was stored without compression; 2, without shuffling; 4, the
        chunk is all zero and was not stored; 8, the chunk is its whole file, which has at most this
        size; 16, the chunk is missing, for any reason; 32, the chunk is uncompressed, and alone in
        its file.
    decoded_bytes
        Bytes of each chunk's elements, at most those of a whole chunk; None if all are whole.
    """

    files: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    flags: NDArray[np.int64]
    decoded_bytes: NDArray[np.int64] | None = None


class ChunkLocations(Protocol):
    """Locates chunks by their number, in C order of the chunk grid."""

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Return the locations of the chunks with these numbers."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Locations of all chunks of an array, at 13 bytes per chunk below 4 GiB.

    Parameters
    ----------
    offsets
        Position of each chunk in its file, in bytes, int64, shape (n_chunks,); -1 if there is no
        chunk.
    sizes
        Stored size of each chunk in bytes, int64 or smaller, shape (n_chunks,).
    flags
        Flags of each chunk, uint8, shape (n_chunks,): the sum of 1, if it was stored without
        compression; 2, without shuffling; 4, if it is all zero and was not stored; 8, if it is its
        whole file, which has at most this size; 16, if it is missing, for any reason; 32, if it is
        uncompressed, and alone in its file.
    files
        Number of each chunk's file, or None if all are in one file.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[Any]
    flags: NDArray[np.uint8]
    files: NDArray[Any] | None = None

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Return the locations of the chunks with these numbers."""
        offsets = self.offsets[chunks]
        files = np.zeros(len(chunks), np.int64) if self.files is None else self.files[chunks]
        sizes, flags = self.sizes[chunks].astype(np.int64), self.flags[chunks].astype(np.int64)
        are_lost = offsets < 0
        if are_lost.any():
            sizes[are_lost], flags[are_lost] = 0, fields.LOST
        return Located(files.astype(np.int64, copy=False), offsets, sizes, flags)


CHUNK_ELEMENTS = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of an uncompressed one-dimensional array, read as chunks of `CHUNK_ELEMENTS`.

    The last chunk of each piece counts as whole, so the elements of the next piece are numbered
    from `firsts` times `CHUNK_ELEMENTS`.

    Parameters
    ----------
    files, offsets
        Number of each piece's file, and its position there in bytes, int64, shape (n_pieces,).
    sizes
        Number of elements in each piece, int64, shape (n_pieces,).
    itemsize
        Bytes per element.

    Attributes
    ----------
    firsts
        Number of the first chunk of each piece, and of all chunks, int64, shape (n_pieces + 1,).
    """

    files: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    itemsize: int
    firsts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        n_chunks = -(-self.sizes // CHUNK_ELEMENTS)
        object.__setattr__(self, "firsts", np.concatenate([[0], np.cumsum(n_chunks)]))

    @classmethod
    def one(cls, offset: int, size: int, itemsize: int) -> "Pieces":
        """Return one piece, in file 0: all elements of a contiguously stored array."""
        return cls(np.zeros(1, np.int64), np.array([offset]), np.array([size]), itemsize)

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """Return the locations of the chunks with these numbers."""
        pieces = np.searchsorted(self.firsts, chunks, side="right") - 1
        first = (chunks - self.firsts[pieces]) * CHUNK_ELEMENTS
        n_elements = np.minimum(CHUNK_ELEMENTS, self.sizes[pieces] - first)
        return Located(
            files=self.files[pieces],
            offsets=self.offsets[pieces] + first * self.itemsize,
            sizes=n_elements * self.itemsize,
            flags=np.zeros(len(chunks), np.int64),
        )


# Finding the chunks that contain requested elements, and what is copied from each of them.

Ints = NDArray[np.int64]


class ChunkPlan(NamedTuple):
    """Chunks, and the segments of each: elements that have one destination.

    Parameters
    ----------
    chunks
        The distinct chunks, ascending, shape (n_chunks,).
    firsts
        The first segment of each, shape (n_chunks,).
    segments
        A table of the kernels, shape (n_segments, N_SEGMENT_COLUMNS).
    """

    chunks: Ints
    firsts: Ints
    segments: Ints


def plan_ranges(
    starts: Ints, counts: Ints, destinations: Ints, chunk_elements: int, out_itemsize: int
) -> tuple[ChunkPlan, Ints]:
    """Plan ranges of a one-dimensional array.

    Parameters
    ----------
    starts, counts
        Ascending, disjoint ranges of elements, shape (n,).
    destinations
        Destination of each range, shape (n,).
    chunk_elements
        Number of elements of a chunk.
    out_itemsize
        Size in bytes of an element at the destination.

    Returns
    -------
    The plan, and the destinations at which a range continues from another chunk.
    """
    most = 2 * starts.size + int(counts.sum()) // chunk_elements
    segments = np.empty((most, fields.N_SEGMENT_COLUMNS), np.int64)
    chunks, firsts, crossings = np.empty((3, most), np.int64)
    n_chunks, n_segments, n_crossings = kernels.plan_ranges(
        starts, counts, destinations, chunk_elements, out_itemsize, segments, chunks, firsts,
        crossings,
    )  # fmt: skip
    plan = ChunkPlan(chunks[:n_chunks].copy(), firsts[:n_chunks].copy(), segments[:n_segments])
    return plan, crossings[:n_crossings].copy()


def plan_rows(
    rows: Ints,
    destinations: Ints,
    n_columns: int,
    chunk_shape: tuple[int, int],
    out_itemsize: int,
) -> ChunkPlan:
    """Plan rows of a two-dimensional array.

    Parameters
    ----------
    rows
        Ascending row numbers, shape (n,).
    destinations
        Destination of each row, shape (n,).
    n_columns
        Number of columns of the array.
    chunk_shape
        Shape of a chunk.
    out_itemsize
        Size in bytes of an element at the destination.
    """
    n_segments = rows.size * -(-n_columns // chunk_shape[1])
    segments = np.empty((n_segments, fields.N_SEGMENT_COLUMNS), np.int64)
    chunks, firsts = np.empty((2, n_segments), np.int64)
    n_chunks = kernels.plan_rows(
        rows, destinations, n_columns, *chunk_shape, out_itemsize, segments, chunks, firsts
    )
    return ChunkPlan(chunks[:n_chunks].copy(), firsts[:n_chunks].copy(), segments)


def plan_selected(
    starts: Ints,
    selected: SelectedElements,
    destinations: Ints,
    chunk_elements: int,
    out_itemsize: int,
) -> ChunkPlan:
    """Plan the selected elements of rows of a one-dimensional array.

    Parameters
    ----------
    starts
        Where each row begins in the array, ascending, shape (n_rows,).
    selected
        The selected elements of each row.
    destinations
        Destination of the first selected element of each row, shape (n_rows,).
    chunk_elements, out_itemsize
        Number of elements of a chunk, and size in bytes of an element at the destination.
    """
    positions, bounds = selected.positions, selected.starts
    with_any = np.flatnonzero(selected.lengths)
    first, last = (
        (starts[with_any] + positions[places]) // chunk_elements
        for places in (bounds[with_any], bounds[with_any + 1] - 1)
    )
    most = int((last - first + 1).sum())  # there may be chunks without any in between
    segments = np.empty((most, fields.N_SEGMENT_COLUMNS), np.int64)
    chunks, firsts = np.empty((2, most), np.int64)
    n_chunks, n_segments = kernels.plan_selected(
        starts, bounds, positions, destinations, chunk_elements, out_itemsize, segments, chunks,
        firsts,
    )  # fmt: skip
    return ChunkPlan(chunks[:n_chunks].copy(), firsts[:n_chunks].copy(), segments[:n_segments])


def chunk_codec(name: str) -> int:
    """Return the code of a codec: "none", "zlib", "gzip", "zstd", "blosc", "lz4" or "lzf".

    Chunks of "lz4" are blocks of LZ4, without a header.

    Raises
    ------
    ParameterError
        There is no such codec.

    Examples
    --------
    >>> chunk_codec("none")
    0
    """
    codecs = {"none": STORED, **ZARR_CODECS, "lz4": LZ4, "lzf": LZF}
    require_one_of("codec", name, [*codecs])
    return codecs[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedArray:
    """A stored array with one or two dimensions, and the encoding of its chunks.

    Parameters
    ----------
    name
        Path of the file or store and name of the element, for messages.
    shape
        Shape of the array, with one dimension, or two if ``chunk_shape`` has two.
    dtype
        Native dtype of its elements.
    chunk_shape
        Shape of a chunk. Chunks at the border are stored whole.
    codec
        Compression of the chunks, a code from `chunk_codec`.
    locations
        Locations of the chunks, by their number in C order of the grid, such as a `ChunkTable`.
    files
        The files or objects with the bytes of the chunks.
    shuffled
        Whether HDF5's shuffle filter was applied before compression.
    delta
        Whether each element of a chunk is stored as its difference from the previous one.
    checksummed
        Whether a CRC32C follows the bytes of each chunk.
    lost_is_zero
        Whether missing chunks are zero. Otherwise they are damage, unless they are chunks of column
        indices for rows without other elements.
    bad_index
        Error message for a column index outside of the matrix; if empty, the file is reported as
        damaged.

    Raises
    ------
    ValueError
        An array of this shape cannot have such chunks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    codec: int
    locations: ChunkLocations
    files: ByteStore
    shuffled: bool = False
    delta: bool = False
    checksummed: bool = False
    lost_is_zero: bool = False
    bad_index: str = ""
    checked: NDArray[np.uint8] = field(init=False, repr=False, compare=False)
    """A bit for each chunk: whether this or a forked process has decompressed it completely."""

    def __post_init__(self) -> None:
        # Compiled code multiplies these numbers, and takes memory and addresses to be as they say.
        check_grid(self.shape, self.chunk_shape, self.dtype.itemsize)
        n_chunks = math.prod(chunk_grid(self.shape, self.chunk_shape))
        object.__setattr__(self, "checked", shared_zeros(-(-n_chunks // 8)))

    @property
    def is_decoded_whole(self) -> bool:
        """Whether whole chunks are read; if not, only needed parts of them.

        That is so if they are compressed or filtered, or have a checksum.
        """
        return self.codec != STORED or self.shuffled or self.delta or self.checksummed

    def reads_of_ranges(
        self,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        destinations: NDArray[np.int64],
        out_dtype: np.dtype[Any],
        *,
        index_limit: int = -1,
        column_map: NDArray[np.int32] | None = None,
    ) -> ChunkReads:
        """Return the reads for ranges of a one-dimensional array.

        Parameters
        ----------
        starts, counts
            Ascending, disjoint ranges of elements, int64, shape (n,).
        destinations
            Destination of each range, int64, shape (n,); `ChunkReads.run` binds it to memory.
        out_dtype
            Dtype at the destinations.
        index_limit
            If not negative, elements are column indices, which must be below it, and become int32.
        column_map
            New index of each column, none of which is left out, int32, shape (index_limit,);
            without an index limit, ranges are dense rows, and it is as in `reads_of_rows`.
        """
        n = self.chunk_shape[0]
        is_in_memory = isinstance(self.locations, Pieces) and self.files.memory is not None
        if is_in_memory and ((starts >= 0) & (starts + counts <= self.shape[0])).all():
            # Chunks follow each other in memory, so a range may go on beyond the one it begins in.
            some = counts > 0
            chunks, within = np.divmod(starts[some], n)
            segments = np.stack([within, counts[some], destinations[some], 0 * within], axis=1)
            firsts, crossings = np.flatnonzero(np.diff(chunks, prepend=-1)), np.empty(0, np.int64)
            plan = ChunkPlan(chunks[firsts], firsts, segments)
        else:
            plan, crossings = plan_ranges(starts, counts, destinations, n, out_dtype.itemsize)
        is_spread = column_map is not None and index_limit < 0
        placing = fields.SPREAD if is_spread else fields.COPIED
        row = array_row(
            self.dtype, out_dtype, index_limit=index_limit, placing=placing, column_map=column_map
        )
        return replace(
            self._reads(plan, row, column_map),
            crossings=crossings if index_limit >= 0 else crossings[:0],
            are_whole=crossings.size == 0 and not is_spread,
        )

    def reads_of_rows(
        self,
        rows: NDArray[np.int64],
        destinations: NDArray[np.int64],
        out_dtype: np.dtype[Any],
        *,
        column_map: NDArray[np.int32] | None = None,
    ) -> ChunkReads:
        """Return the reads for whole rows of a two-dimensional array.

        Parameters
        ----------
        rows
            Ascending rows, int64, shape (n,).
        destinations
            Destination of each row, int64, shape (n,); `ChunkReads.run` binds it to memory.
        out_dtype
            Dtype at the destinations.
        column_map
            New index of each column within the row, -1 to leave it out, int32, shape (n_columns,).
        """
        chunk_rows, chunk_columns = self.chunk_shape
        plan = plan_rows(
            rows, destinations, self.shape[1], (chunk_rows, chunk_columns), out_dtype.itemsize
        )
        placing = fields.COPIED if column_map is None else fields.SPREAD
        row = array_row(self.dtype, out_dtype, placing=placing, column_map=column_map)
        return self._reads(plan, row, column_map)

    def reads_selecting(
        self,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        *,
        column_map: NDArray[np.int32],
    ) -> ChunkReads:
        """Return the reads of ranges of column indices for `ChunkReads.select`.

        Parameters
        ----------
        starts, counts
            Ascending, disjoint ranges of elements, int64, shape (n,).
        column_map
            New index of each column, -1 to leave it out, int32, shape (n_columns,).
        """
        is_selected = (column_map >= 0).view(np.uint8)
        row = array_row(
            self.dtype,
            np.dtype(np.int32),
            index_limit=len(column_map),
            placing=fields.SELECTED,
            column_map=column_map,
        )
        row[fields.IS_SELECTED] = is_selected.ctypes.data
        no_destinations = np.zeros(len(starts), np.int64)
        plan, _ = plan_ranges(starts, counts, no_destinations, self.chunk_shape[0], 0)
        return self._reads(plan, row, (column_map, is_selected))

    def reads_of_selected(
        self,
        starts: NDArray[np.int64],
        selected: SelectedElements,
        destinations: NDArray[np.int64],
        out_dtype: np.dtype[Any],
    ) -> ChunkReads:
        """Return the reads for the values of elements that `ChunkReads.select` selected.

        Parameters
        ----------
        starts
            Start of each row, ascending, int64, shape (n_rows,).
        selected
            The selected elements of each row.
        destinations
            Destination of each row, int64, shape (n_rows,); `ChunkReads.run` binds it.
        out_dtype
            Dtype at the destinations.
        """
        plan = plan_selected(
            starts, selected, destinations, self.chunk_shape[0], out_dtype.itemsize
        )
        row = array_row(self.dtype, out_dtype, placing=fields.PICKED)
        return self._reads(plan, row, selected.positions)

    def _reads(
        self,
        plan: ChunkPlan,
        array: NDArray[np.int64],
        tables: object,
    ) -> ChunkReads:
        """Return reads; ``array`` and segments may have addresses in ``tables``."""
        located = self.locations.locate(plan.chunks)
        offsets, sizes = located.offsets, located.sizes
        if not self.is_decoded_whole:
            placing = int(array[fields.PLACING])
            kernels.trim(offsets, sizes, plan.firsts, plan.segments, self.dtype.itemsize, placing)
        table, open_files = chunk_table(
            self.files,
            located.files,
            offsets,
            sizes,
            firsts=plan.firsts,
            n_segments=len(plan.segments),
            flags=located.flags,
        )
        table[:, fields.NUMBER] = plan.chunks
        array[fields.CODEC] = self.codec
        array[fields.CHECKED] = self.checked.ctypes.data
        array[fields.SHUFFLED] = self.shuffled
        array[fields.DELTA] = self.delta
        array[fields.CHECKSUMMED] = self.checksummed
        array[fields.DECODED_BYTES] = self.dtype.itemsize * math.prod(self.chunk_shape)
        array[fields.LOST_IS_ZERO] = self.lost_is_zero
        arrays = array[None]
        if located.decoded_bytes is not None:
            sizes, table[:, fields.ARRAY] = np.unique(located.decoded_bytes, return_inverse=True)
            arrays = np.repeat(arrays, len(sizes), axis=0)
            arrays[:, fields.DECODED_BYTES] = sizes
        return ChunkReads(
            arrays=arrays,
            chunks=table,
            segments=plan.segments,
            owners=(self,) * len(arrays),
            files=((self.files, located.files),),
            keep_alive=(tables, self.checked, open_files),
        )

    def describe(self, chunk: int) -> str:
        """Return the elements and bytes of a chunk, for a message."""
        located = self.locations.locate(np.array([chunk], np.int64))
        where = self.files.location_of(int(located.files[0]))
        first, size = int(located.offsets[0]), int(located.sizes[0])
        grid = chunk_grid(self.shape, self.chunk_shape)
        corner = [int(k) for k in np.unravel_index(chunk, grid)]
        bounds = [
            f"{k * c} to {min((k + 1) * c, n)}"
            for k, c, n in zip(corner, self.chunk_shape, self.shape, strict=True)
        ]
        elements = f"elements {bounds[0]}" if len(bounds) == 1 else f"rows {bounds[0]}"
        if size == 0 or located.flags[0] & fields.WHOLE_FILE:
            return f"{where}: `{self.name}`, {elements}"
        return f"{where}: `{self.name}`, {elements} (bytes {first} to {first + size})"


def pieced_array(name: str, pieces: Pieces, dtype: np.dtype[Any], files: ByteStore) -> ChunkedArray:
    """Return an array that is stored in pieces.

    Parameters
    ----------
    name
        Its name in messages.
    pieces
        The pieces.
    dtype
        Native dtype of its elements.
    files
        The files of the pieces.
    """
    return ChunkedArray(
        name=name,
        shape=(int(pieces.firsts[-1]) * CHUNK_ELEMENTS,),
        dtype=dtype,
        chunk_shape=(CHUNK_ELEMENTS,),
        codec=STORED,
        locations=pieces,
        files=files,
    )


# Where rows lie in stored arrays.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Extents:
    """Ranges of stored elements that rows consist of; int64 arrays, shape (n_extents,).

    Parameters
    ----------
    lengths
        Number of elements in each row, shape (n_rows,).
    firsts
        First element of each extent in the array of values, ascending.
    counts
        Number of elements in each extent.
    rows
        Index of each extent's row among the requested rows; the extents of a row are in the order
        of its elements. None if each row is one extent.
    within
        Position of the extent's first element in its row; None if each row is one extent.
    index_firsts
        First element of each extent in the array of column indices; None if it is the same as in
        the array of values.
    """

    lengths: NDArray[np.int64]
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64] | None = None
    within: NDArray[np.int64] | None = None
    index_firsts: NDArray[np.int64] | None = None

    def destinations(self, of_rows: NDArray[np.int64], itemsize: int) -> NDArray[np.int64]:
        """Return the destination of each extent, from those of rows."""
        if self.rows is None or self.within is None:
            return of_rows
        return of_rows[self.rows] + self.within * itemsize

    def selected(self, counts: NDArray[np.int64]) -> "Extents":
        """Return the same extents with fewer elements in each, which are selected elsewhere."""
        if self.rows is None:
            return replace(self, lengths=counts, counts=counts)
        order, within = self.row_order, np.empty_like(self.rows)
        lengths = np.bincount(self.rows, counts, self.lengths.size).astype(np.int64)
        ends = np.cumsum(counts[order])
        of_earlier_rows = (np.cumsum(lengths) - lengths)[self.rows[order]]
        within[order] = ends - counts[order] - of_earlier_rows
        return replace(self, lengths=lengths, counts=counts, within=within)

    @property
    def in_indices(self) -> NDArray[np.int64]:
        """First element of each extent in the array of column indices."""
        return self.firsts if self.index_firsts is None else self.index_firsts

    @property
    def row_order(self) -> NDArray[np.intp]:
        """The extents of the first row, in order, then those of the next row, and so on."""
        return np.argsort(self.rows, kind="stable") if self.rows is not None else np.arange(0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FileExtents(Extents):
    """Extents in plain files, row by row; none is empty.

    Parameters
    ----------
    files
        File of each extent, in which ``firsts`` count.
    lengths, firsts, counts, rows, within
        See `Extents`.
    """

    rows: NDArray[np.int64]
    within: NDArray[np.int64]
    files: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowRanges:
    """Rows of uncompressed elements in plain files, each in one byte range or a few.

    The ranges need not form a grid, and may overlap. Each extent takes one read; adjacent ones are
    read together.

    Parameters
    ----------
    name
        Name of the array, for messages.
    shape
        Number of rows and, if all rows have equally many, of elements per row.
    dtype
        Native dtype of the elements, which may be structured.
    files
        The files.
    extents
        Returns the extents of ascending rows, int64, shape (n,).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    files: ByteStore
    extents: Callable[[NDArray[np.int64]], FileExtents]

    @property
    def layout(self) -> Literal["dense", "ragged"]:
        """Layout of the rows."""
        return "dense" if len(self.shape) > 1 else "ragged"

    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of elements in each of these ascending rows, int64, shape (n,)."""
        return self.extents(rows).lengths

    def reads(
        self,
        rows: NDArray[np.int64],
        destinations: NDArray[np.int64],
        out_dtype: np.dtype[Any],
    ) -> ChunkReads:
        """Return the reads for rows.

        Parameters
        ----------
        rows
            Ascending rows, int64, shape (n,).
        destinations
            Destination of each row, int64, shape (n,); `ChunkReads.run` binds it to memory.
        out_dtype
            Dtype at the destinations.
        """
        extents, itemsize = self.extents(rows), self.dtype.itemsize
        chunks, open_files = chunk_table(
            self.files,
            extents.files,
            extents.firsts * itemsize,
            extents.counts * itemsize,
            firsts=np.arange(extents.counts.size),
            n_segments=extents.counts.size,
        )
        chunks[:, fields.NUMBER] = rows[extents.rows]
        segments = np.zeros((len(chunks), fields.N_SEGMENT_COLUMNS), np.int64)
        segments[:, fields.COUNT] = extents.counts
        segments[:, fields.TO] = extents.destinations(destinations, out_dtype.itemsize)
        segments[:, fields.WITHIN] = extents.within
        array = array_row(self.dtype, out_dtype)
        array[fields.DECODED_BYTES] = int(chunks[:, fields.SIZE].max(initial=0))
        return ChunkReads(
            arrays=array[None],
            chunks=chunks,
            segments=segments,
            owners=(self,),
            files=((self.files, extents.files),),
            keep_alive=(open_files,),
        )

    def describe(self, chunk: int) -> str:
        """Return the location of a row, for a message."""
        extents = self.extents(np.array([chunk], np.int64))
        where = {str(self.files.location_of(file)): None for file in extents.files.tolist()}
        first = int(extents.firsts[0]) * self.dtype.itemsize
        size = int(extents.counts[0]) * self.dtype.itemsize
        return f"{', '.join(where)}: `{self.name}`, row {chunk} (bytes {first} to {first + size})"
