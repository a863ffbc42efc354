"""Compiled: the order that sorts words, digit by digit."""

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from cellfeed._compiled import compiled

__all__ = ["radix_order"]

_DIGIT_BITS, _N_DIGITS = 8, 8
_N_VALUES = 1 << _DIGIT_BITS


@compiled("int64[:,::1](uint64[:,::1])")
def radix_order(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each row of words which are next when they ascend; equal ones stay in order.

    The lowest digit is sorted by first. Digits that all words of a row have in common are left out.

    Parameters
    ----------
    words
        Shape (n, size).

    Returns
    -------
    int64, shape (n, size).
    """
    n_rows, n = words.shape
    found = np.empty((n_rows, n), np.int64)
    keys, moved_keys = np.empty(n, np.uint64), np.empty(n, np.uint64)
    order, moved_order = np.empty(n, np.int64), np.empty(n, np.int64)
    for row in range(n_rows):
        counts = np.zeros((_N_DIGITS, _N_VALUES), np.int64)
        for i in range(n):
            keys[i], order[i] = words[row, i], i
            for digit in range(_N_DIGITS):
                counts[digit, (keys[i] >> uint64(digit * _DIGIT_BITS)) & uint64(_N_VALUES - 1)] += 1
        for digit in range(_N_DIGITS):
            shift, first, most = uint64(digit * _DIGIT_BITS), 0, 0
            for value in range(_N_VALUES):  # from how many there are to where they begin
                most = max(most, counts[digit, value])
                counts[digit, value], first = first, first + counts[digit, value]
            if most == n:
                continue
            for i in range(n):
                value = (keys[i] >> shift) & uint64(_N_VALUES - 1)
                place = counts[digit, value]
                moved_keys[place], moved_order[place] = keys[i], order[i]
                counts[digit, value] += 1
            keys, moved_keys = moved_keys, keys
            order, moved_order = moved_order, order
        for i in range(n):  # assigning a row compiles numba's messages about shapes too
            found[row, i] = order[i]
    return found
