"""A compiled `Permutation`.

Importing this module loads the compiled code, so only processes that read cells import it.
Nothing compiled comes from another folder.
"""

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from cellfeed._compiled import compiled

# A `Permutation` of some elements.

# Constants of SplitMix64; see `random_words`.
_GOLDEN = uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = uint64(0x94D049BB133111EB)


@compiled("uint64(uint64, uint64)", inner=True)
def _word(key: np.uint64, counter: np.uint64) -> np.uint64:
    word = counter * _GOLDEN + (key + _GOLDEN)
    word = (word ^ (word >> uint64(30))) * _MULTIPLIER_1
    word = (word ^ (word >> uint64(27))) * _MULTIPLIER_2
    return np.uint64(word ^ (word >> uint64(31)))


@compiled("void(uint64[::1], int64, uint64[::1], int64[::1], int64)", inner=True)
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


@compiled("void(uint64[::1], int64, uint64[::1], int64[::1], uint64[::1], int64[::1], int64)")
def permute(
    words: NDArray[np.uint64],
    n_words: int,
    walking: NDArray[np.uint64],
    places: NDArray[np.int64],
    keys: NDArray[np.uint64],
    rounds: NDArray[np.int64],
    n: int,
) -> None:
    """Replace each of the first words by its image; see `Permutation`.

    Parameters
    ----------
    words, n_words
        Elements below ``n``, and the number of them to permute.
    walking, places
        Memory to work in, for as many elements; what allocates takes a third longer to compile.
    keys, rounds
        Keys of the rounds, and the order of the rounds; the reverse order gives the inverse.
    n
        Number of elements of the permutation.
    """
    n_bits = 2
    while n > 1 << n_bits:
        n_bits += 1
    _feistel(words, n_words, keys, rounds, n_bits)
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
