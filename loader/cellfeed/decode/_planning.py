"""Finding the chunks that contain requested elements, and what is copied from each of them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellfeed.decode import _kernels as kernels
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._placing import SelectedElements

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
