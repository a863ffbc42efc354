"""Compiled: sums over cells, for each gene and batch, and over genes, for each cell.

Tasks have disjoint ranges of genes, so that they share tables without locks, and each sum is
taken in the order of the cells, whatever the number of threads.
"""

import numpy as np
from numpy.typing import NDArray

from cellfeed.extending import compiled

# Columns of the table of sums: number of values other than 0; their sum and sum of squares, less
# the largest values, which are listed separately; and the smallest of these.
COUNT, SUM, SQUARES, LEAST, N_COLUMNS = range(5)
# Numbers of values that are NaN or infinite, negative, and no integers; and the row and the place
# of the last one of the first kind.
NOT_FINITE, NEGATIVE, FRACTIONAL, ROW, PLACE, N_FOUND = range(6)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled(
    "void(float64[:,:,::1], float64[:,:,::1], int64, int64, float64, float64)",
    inner=True,
)
def _add(
    sums: Floats, largest: Floats, batch: int, column: int, value: float, limit: float
) -> None:
    """Add a value to the sums of a gene, or the smallest of its largest values in its place.

    Arrays are indexed and not sliced, since counting references to slices would take longer than
    all else.
    """
    value = min(value, limit)
    if value > sums[batch, column, LEAST]:
        place, least, next_least = 0, np.inf, value
        for k in range(largest.shape[2]):
            each = largest[batch, column, k]
            if each < least:
                place, least, next_least = k, each, min(least, next_least)
            else:
                next_least = min(each, next_least)
        largest[batch, column, place] = value
        sums[batch, column, LEAST] = next_least
        value = least
    sums[batch, column, COUNT] += 1
    sums[batch, column, SUM] += value
    sums[batch, column, SQUARES] += value * value


@compiled("int64(int32[::1], int64, int64, int64)", inner=True)
def _first_from(columns: NDArray[np.int32], low: int, high: int, least: int) -> int:
    """Return the place of the first of ascending columns that is not below ``least``."""
    while low < high:
        middle = (low + high) // 2
        if columns[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low


@compiled(
    *(
        f"void({value}[::1], int32[::1], int64[::1], int64[::1], int64, int64, "
        "float64[:,::1], float64[:,:,::1], float64[:,:,::1])"
        for value in ("float32", "float64")
    )
)
def add_sparse(
    values: NDArray[np.floating],
    columns: NDArray[np.int32],
    pointers: Ints,
    batches: Ints,
    first: int,
    stop: int,
    limits: Floats,
    sums: Floats,
    largest: Floats,
) -> None:
    """Add sparse rows to the sums of some genes.

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
    sums, largest
        Sums of each batch and gene, shape (n_batches, n_genes, N_COLUMNS), and its largest values,
        shape (n_batches, n_genes, n).
    """
    for row in range(batches.size):
        batch, end = batches[row], pointers[row + 1]
        for place in range(_first_from(columns, pointers[row], end, first), end):
            column = columns[place]
            if column >= stop:
                break
            value: float = np.float64(values[place])
            if value != 0:
                limit: float = limits[batch, column] if limits.size else np.inf
                _add(sums, largest, batch, column, value, limit)


@compiled(
    *(
        f"void({value}[:,::1], int64[::1], int64, int64, "
        "float64[:,::1], float64[:,:,::1], float64[:,:,::1])"
        for value in ("float32", "float64")
    )
)
def add_dense(
    values: NDArray[np.floating],
    batches: Ints,
    first: int,
    stop: int,
    limits: Floats,
    sums: Floats,
    largest: Floats,
) -> None:
    """Add dense rows, shape (n_rows, n_genes), to the sums of some genes; see `add_sparse`."""
    for row in range(batches.size):
        batch = batches[row]
        for column in range(first, stop):
            value: float = np.float64(values[row, column])
            if value != 0:
                limit: float = limits[batch, column] if limits.size else np.inf
                _add(sums, largest, batch, column, value, limit)


@compiled(
    *(
        f"void({value}[::1], int64[::1], float64[::1], int32[::1], int64[::1])"
        for value in ("float32", "float64")
    )
)
def sum_rows(
    values: NDArray[np.floating],
    pointers: Ints,
    totals: Floats,
    n_nonzero: NDArray[np.int32],
    found: Ints,
) -> None:
    """Sum the values of each row, count those other than 0, and find those that are no counts.

    Parameters
    ----------
    values, pointers
        Values of rows, and where each row begins.
    totals, n_nonzero
        Sums and counts of each row, shape (n_rows,).
    found
        Counts of values that are no counts, shape (N_FOUND,).
    """
    for row in range(totals.size):
        total, n = 0.0, 0
        for place in range(pointers[row], pointers[row + 1]):
            value: float = np.float64(values[place])
            total += value
            n += value != 0
            if value < 0 or value != np.floor(value) or value == np.inf:
                if not np.isfinite(value):
                    found[NOT_FINITE] += 1
                    found[ROW], found[PLACE] = row, place
                elif value < 0:
                    found[NEGATIVE] += 1
                if value != np.floor(value):
                    found[FRACTIONAL] += 1
        totals[row] = total
        n_nonzero[row] = n
