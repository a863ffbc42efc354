"""Compiled: finding where rows lie in tiles of TileDB, which store the row of each element.

A run is a sequence of elements of one row within one tile. Rows are numbered within a band of rows,
so that 16 bits suffice.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed.extending import compiled

Ints: TypeAlias = NDArray[np.int64]

# Columns of a table of pieces: number among the requested rows; first element; number of elements;
# and number of elements of the row before them.
ROW, FIRST, N_ELEMENTS, BEFORE, N_ROW_PIECE_COLUMNS = range(5)


@compiled(
    "int64(uint16[::1], uint16[::1], int64, int32[::1], int64[::1], int64[:,::1])",
)
def find_row_pieces(
    run_rows: NDArray[np.uint16],
    run_lengths: NDArray[np.uint16],
    first: int,
    places: NDArray[np.int32],
    lengths: Ints,
    pieces: Ints,
) -> int:
    """List the runs of some rows of a band.

    Parameters
    ----------
    run_rows, run_lengths
        The row of each run in its band, and its number of elements.
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
