"""Compiled: blocks of unequal size in the order of a `Permutation`, by position."""

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.sampling._aligned._bounds import bound

__all__ = ["GROUP", "group_sizes", "rows_at"]

GROUP = 1024  # blocks of which only the rows together are kept
_GROUP_BITS = 10
_AT_ONCE = 64  # blocks that are permuted together, by vector instructions

# Of SplitMix64; see `random_words`.
_GOLDEN = uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = uint64(0x94D049BB133111EB)


@compiled("uint64(uint64, uint64)")
def _word(key: np.uint64, counter: np.uint64) -> np.uint64:
    word = counter * _GOLDEN + (key + _GOLDEN)
    word = (word ^ (word >> uint64(30))) * _MULTIPLIER_1
    word = (word ^ (word >> uint64(27))) * _MULTIPLIER_2
    return np.uint64(word ^ (word >> uint64(31)))


@compiled("void(uint64[::1], int64, uint64[::1], int64[::1], int64)")
def _feistel(
    words: NDArray[np.uint64],
    n_words: int,
    keys: NDArray[np.uint64],
    rounds: NDArray[np.int64],
    n_bits: int,
) -> None:
    low_bits = uint64(n_bits // 2)
    low_mask = (uint64(1) << low_bits) - uint64(1)
    high_mask = (uint64(1) << uint64(n_bits - n_bits // 2)) - uint64(1)
    for number in rounds:
        key = keys[number]
        if number % 2:
            for i in range(n_words):
                words[i] ^= _word(key, words[i] >> low_bits) & low_mask
        else:
            for i in range(n_words):
                words[i] ^= (_word(key, words[i] & low_mask) & high_mask) << low_bits


@compiled("void(uint64[::1], int64, uint64[::1], int64[::1], int64)")
def _permute(
    words: NDArray[np.uint64],
    n_words: int,
    keys: NDArray[np.uint64],
    rounds: NDArray[np.int64],
    n: int,
) -> None:
    """Put the image of each of the first words in its place; see `Permutation`.

    Parameters
    ----------
    words, n_words
        Elements below ``n``, and how many of them are meant.
    keys, rounds
        Keys of the rounds, and the rounds in their order, which backwards undoes the permutation.
    n
        Number of elements that there are.
    """
    n_bits = 2
    while n > 1 << n_bits:
        n_bits += 1
    _feistel(words, n_words, keys, rounds, n_bits)
    walking, places = np.empty(n_words, np.uint64), np.empty(n_words, np.int64)
    n_outside = 0
    for i in range(n_words):
        if words[i] >= uint64(n):
            walking[n_outside], places[n_outside] = words[i], i
            n_outside += 1
    while n_outside:
        _feistel(walking, n_outside, keys, rounds, n_bits)
        n_left = 0
        for i in range(n_outside):
            if walking[i] >= uint64(n):
                walking[n_left], places[n_left] = walking[i], places[i]
                n_left += 1
            else:
                words[places[i]] = walking[i]
        n_outside = n_left


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
            _permute(words, n_waiting, keys, rounds, n_blocks)
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
        _permute(words, n_words, keys, rounds, n_blocks)
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
