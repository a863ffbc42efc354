"""Selecting elements of sparse rows, after their column indices have been read."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._decoder import Decoder
from cellfeed._chunks._placing import out_of_bounds, scratch_bytes, selecting_row

__all__ = ["KeptElements", "gathered", "kept_of"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptElements:
    """The kept elements of sparse rows.

    Parameters
    ----------
    starts
        Start of each row in the arrays below, int64, shape (n_rows + 1,).
    columns
        Columns in the collection, ascending in each row, int32, shape (n_kept,).
    entries
        For each kept element, in stored order, its position in the stored row in the upper 32 bits,
        and its slot in the resulting row in the lower 32 bits, int64, shape (n_kept,).
    ascending
        Whether the columns of each row are distinct.
    """

    starts: NDArray[np.int64]
    columns: NDArray[np.int32]
    entries: NDArray[np.int64]
    ascending: bool

    def __getitem__(self, rows: slice) -> "KeptElements":
        starts = self.starts[rows.start : rows.stop + 1]
        own = slice(starts[0], starts[-1])
        return KeptElements(
            starts - starts[0], self.columns[own], self.entries[own], self.ascending
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of kept elements in each row, int64, shape (n_rows,)."""
        return np.diff(self.starts)


def gathered(
    segments: NDArray[np.int64],
    kept: NDArray[np.int64],
    lengths: NDArray[np.int64],
    decoder: Decoder,
) -> KeptElements:
    """Return the kept elements of rows, from the segments that the kernels have filled.

    Parameters
    ----------
    segments
        Segments of all rows, row by row.
    kept
        The list to which they refer.
    lengths
        Number of stored elements in each row, int64, shape (n_rows,).
    decoder
        The decoder.
    """
    row_firsts = np.flatnonzero(segments[:, kernels.WITHIN] == 0)
    n_segments = np.diff(row_firsts, append=len(segments))
    rows = np.repeat(np.flatnonzero(lengths), n_segments)
    counts = np.bincount(rows, segments[:, kernels.COUNT], minlength=lengths.size)
    starts = np.concatenate([[0], np.cumsum(counts.astype(np.int64))])
    memory = decoder.pool.acquire(12 * kept.size)
    entries = memory.array(np.dtype(np.int64), kept.size)
    columns = memory.array(np.dtype(np.int32), kept.size, start=entries.nbytes)

    def gather(first: int, stop: int) -> bool:
        own = slice(first, stop)
        return bool(kernels.gather(segments[own], rows[own], starts, kept, columns, entries))

    if decoder.threads is None or not row_firsts.size:
        ascending = gather(0, len(segments))
    else:
        shares = np.linspace(0, row_firsts.size, decoder.n_threads, endpoint=False).astype(int)
        bounds = [*np.unique(row_firsts[shares]).tolist(), len(segments)]
        ascending = all(list(decoder.threads.map(gather, bounds[:-1], bounds[1:])))
    return KeptElements(starts, columns, entries, ascending)


def kept_of(
    indices: NDArray[Any], lengths: NDArray[np.int64], column_map: NDArray[np.int32]
) -> KeptElements:
    """Return the kept elements of rows whose column indices are in memory.

    Parameters
    ----------
    indices, lengths
        Concatenated column indices of all rows, and the number in each row.
    column_map
        New index of each column, -1 to leave it out, int32, shape (n_columns,).

    Raises
    ------
    ValueError
        A column index is out of bounds.
    """
    indices = np.ascontiguousarray(indices, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    _, _, segments, _ = kernels.plan_flat(
        starts, lengths, np.zeros_like(starts), max(1, indices.size), 0
    )
    kept = np.empty(indices.size, np.int64)
    report = np.zeros(kernels.N_REPORTS, np.int64)
    report[kernels.KEPT] = kept.ctypes.data
    array, tables = selecting_row(indices.dtype, column_map)
    array[kernels.DECODED_BYTES] = indices.nbytes
    scratch = np.empty(scratch_bytes(array[None]), np.uint8)
    kernels.place(indices.ctypes.data, segments, array, report, scratch.ctypes.data)
    del tables  # whose addresses were used by now
    if report[kernels.FAILURE]:
        raise ValueError(out_of_bounds(column_map.size))
    return gathered(segments, kept[: report[kernels.N_KEPT]], lengths, Decoder())
