"""Compiled: blocks of unequal size in the order of a `Permutation`, by position."""

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.sampling._kernels._bounds import bound
from cellfeed.sampling._kernels._permute import permute

__all__ = ["GROUP", "group_sizes", "rows_at"]

GROUP = 1024  # blocks of which only the rows together are kept
_GROUP_BITS = 10
_AT_ONCE = 64  # blocks that are permuted together, by vector instructions


@compiled("int64[::1](int64[:,::1], int64[::1], int64, int64, uint64[::1])")
def group_sizes(
    files: NDArray[np.int64],
    indices: NDArray[np.int64],
    n: int,
    block_size: int,
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Return how many rows each `GROUP` of blocks has, in the order of the epoch.

    Blocks are visited in the order of storage, so that where rows begin is read from one end to
    the other, and each is asked which group it is in.

    Parameters
    ----------
    files, indices, n
        As of `bound`.
    block_size
        Rows of a block, were it not aligned.
    keys
        Of the rounds of the permutation of blocks.

    Returns
    -------
    int64, shape (n_groups,).
    """
    n_blocks = (n + block_size - 1) // block_size
    sums = np.zeros((n_blocks + GROUP - 1) // GROUP, np.int64)
    words, sizes = np.empty(_AT_ONCE, np.uint64), np.empty(_AT_ONCE, np.int64)
    rounds = np.arange(keys.size - 1, -1, -1)
    n_waiting, begin = 0, 0
    for block in range(n_blocks):
        place = (block + 1) * block_size
        if begin < place:
            end = bound(files, indices, n, place)
            words[n_waiting], sizes[n_waiting] = block, end - begin
            n_waiting += end > begin
            begin = end
        if n_waiting == _AT_ONCE or block == n_blocks - 1:
            permute(words, n_waiting, keys, rounds, n_blocks)
            for i in range(n_waiting):
                sums[words[i] >> uint64(_GROUP_BITS)] += sizes[i]
            n_waiting = 0
    return sums


@compiled("int64[::1](int64[::1], int64[::1], int64[:,::1], int64[::1], int64, int64, uint64[::1])")
def rows_at(
    positions: NDArray[np.int64],
    group_ends: NDArray[np.int64],
    files: NDArray[np.int64],
    indices: NDArray[np.int64],
    n: int,
    block_size: int,
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Return the rows, or the places among ``indices``, at ascending positions of an epoch.

    Parameters
    ----------
    positions
        Ascending, in [0, n), shape (n_positions,).
    group_ends
        Where each group of blocks ends, int64, shape (n_groups,).
    files, indices, n, block_size, keys
        As of `group_sizes`.

    Raises
    ------
    ValueError
        There are no such positions.
    """
    n_blocks = (n + block_size - 1) // block_size
    rows = np.empty(positions.size, np.int64)
    words, rounds = np.empty(_AT_ONCE, np.uint64), np.arange(keys.size)
    slot, end, k = 0, 0, 0  # the next block, and where it begins
    while k < positions.size and slot < n_blocks:
        group = np.searchsorted(group_ends, positions[k], side="right")
        if slot // GROUP < group:
            slot, end = group * GROUP, group_ends[group - 1]
        n_words = min(_AT_ONCE, n_blocks - slot)
        for i in range(n_words):
            words[i] = slot + i
        permute(words, n_words, keys, rounds, n_blocks)
        slot += n_words
        for i in range(n_words):
            place = np.int64(words[i]) * block_size
            first = bound(files, indices, n, place)
            if first >= place + block_size:
                continue
            start, end = end, end + bound(files, indices, n, place + block_size) - first
            while k < positions.size and positions[k] < end:
                rows[k] = first + positions[k] - start
                k += 1
    if k < positions.size:
        raise ValueError("positions are outside of the epoch, or row pointers have changed")
    return rows
