"""Compiled: where rows begin in tiles of TileDB, of whose elements each has the number of its row.

A run is a stretch of elements of one row within one tile. Rows are counted from the first of a
band of them, so that 16 bits suffice.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._compiled import compiled

__all__ = ["MOST_ROWS", "N_ROW_PIECE_COLUMNS", "find_row_pieces", "find_runs"]

MOST_ROWS = (1 << 16) - 1  # of a band, and elements of a run

# Columns of a table of pieces: which of the rows that were asked for; the first element; how many;
# and how many elements of its row come before them.
ROW, FIRST, N_ELEMENTS, BEFORE, N_ROW_PIECE_COLUMNS = range(5)


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
        Elements of a tile.
    first_row, n_rows
        The band.
    run_rows, run_lengths
        Filled; as long as ``rows``.

    Returns
    -------
    Elements of earlier bands before the first run, elements up to the end of the last one, and the
    number of runs.
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
        Which of the rows asked for each row of the band is, -1 if it is none.
    lengths
        How many elements the rows asked for have; added to.
    pieces
        Filled; as many rows as there are runs.

    Returns
    -------
    How many there are.
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
