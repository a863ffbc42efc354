"""Compiled: sums over cells, for each gene and batch.

Tasks have disjoint ranges of genes, so that they share tables without locks, and each sum is
taken in the order of the cells, whatever the number of threads.
"""

import numpy as np
from numpy.typing import NDArray

from cellfeed.extending import compiled

# Columns of the table of sums: number of values other than 0, their sum, and their sum of squares.
COUNT, SUM, SQUARES, N_COLUMNS = range(4)

Ints = NDArray[np.int64]


@compiled(
    *(
        f"void({value}[::1], int32[::1], int64[::1], int64[::1], int64, int64, "
        "float64[:,::1], float64[:,:,::1])"
        for value in ("float32", "float64")
    )
)
def add_rows(
    values: NDArray[np.floating],
    columns: NDArray[np.int32],
    pointers: Ints,
    batches: Ints,
    first: int,
    stop: int,
    limits: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    """Add rows to the sums of some genes.

    Parameters
    ----------
    values, columns, pointers
        Rows in CSR form; columns ascend in each.
    batches
        Batch of each row.
    first, stop
        Range of genes.
    limits
        Values are clipped to at most these, shape (n_batches, n_genes); empty for no limits.
    sums
        Sums of each batch and gene, shape (n_batches, n_genes, N_COLUMNS).
    """
    for row in range(batches.size):
        batch, begin, end = batches[row], pointers[row], pointers[row + 1]
        for place in range(begin + np.searchsorted(columns[begin:end], first), end):
            column = columns[place]
            if column >= stop:
                break
            value: float = np.float64(values[place])
            if limits.size:
                value = min(value, limits[batch, column])
            sums[batch, column, COUNT] += value != 0
            sums[batch, column, SUM] += value
            sums[batch, column, SQUARES] += value * value
