"""Compiled: finding where rows begin in tiles of TileDB, which store the row of each element.

A run is a sequence of elements of one row within one tile. Rows are numbered within a band of
rows, so that 16 bits suffice.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks._kernels._tables import (
    BEFORE,
    FIRST,
    MOST_ROWS,
    N_ELEMENTS,
    ROW,
)
from cellfeed._compiled import compiled

__all__ = ["find_row_pieces", "find_runs"]


@compiled("Tuple((int64, int64, int64))(int64[::1], int64, int64, int64, uint16[::1], uint16[::1])")
def find_runs(
    rows: NDArray[np.int64],
    capacity: int,
    first_row: int,
    n_rows: int,
    run_rows: NDArray[np.uint16],
    run_lengths: NDArray[np.uint16],
) -> Any:
    """Find the runs of a band in whole tiles.

    Parameters
    ----------
    rows
        The row of each element.
    capacity
        Number of elements of a tile.
    first_row, n_rows
        The band.
    run_rows, run_lengths
        Output; as long as ``rows``.

    Returns
    -------
    Number of elements of earlier bands before the first run, of elements up to the end of the last
    run, and of runs.
    """
    skipped = 0
    while skipped < rows.size and rows[skipped] < first_row:
        skipped += 1
    i, n = skipped, 0
    while i < rows.size:
        row = rows[i] - first_row
        if not 0 <= row < n_rows:
            break
        stop = min(rows.size, (i // capacity + 1) * capacity, i + MOST_ROWS)
        k = i + 1
        while k < stop and rows[k] == rows[i]:
            k += 1
        run_rows[n], run_lengths[n] = row, k - i
        n += 1
        i = k
    return skipped, i, n


@compiled(
    "int64(uint16[::1], uint16[::1], int64, int32[::1], int64[::1], int64[:,::1])",
)
def find_row_pieces(
    run_rows: NDArray[np.uint16],
    run_lengths: NDArray[np.uint16],
    first: int,
    places: NDArray[np.int32],
    lengths: NDArray[np.int64],
    pieces: NDArray[np.int64],
) -> int:
    """List the runs of some rows of a band.

    Parameters
    ----------
    run_rows, run_lengths
        As `find_runs` found them.
    first
        Number of the first element of the first run.
    places
        Number of each row of the band among the requested rows, -1 for other rows.
    lengths
        Number of elements of each requested row; added to.
    pieces
        Output; as many rows as there are runs.

    Returns
    -------
    Number of pieces.
    """
    n, element = 0, np.int64(first)
    for k in range(run_rows.size):
        place, length = places[run_rows[k]], np.int64(run_lengths[k])
        if place >= 0:
            pieces[n, ROW] = place
            pieces[n, FIRST] = element
            pieces[n, N_ELEMENTS] = length
            pieces[n, BEFORE] = lengths[place]
            lengths[place] += length
            n += 1
        element += length
    return n
