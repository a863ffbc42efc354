"""Counter-based randomness: any draw of any stream is computed directly from its number.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): word number ``c`` of the stream ``key`` is ``mix(key + c * golden)``.
Unlike a NumPy ``Generator``, it has no state to carry or advance, and its output does not depend
on NumPy's version.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["derive_key", "random_below", "random_words"]

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def random_words(key: int, counters: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return 64-bit words of the stream ``key``, by their numbers.

    Parameters
    ----------
    key
        The stream, 0 <= key < 2**64; see `derive_key`.
    counters
        Numbers of the words, integers of any shape.

    Returns
    -------
    Words, uint64, in the shape of ``counters``. The bits of a word are independent of each other
    and of the bits of other words.

    Examples
    --------
    >>> random_words(0, np.arange(2))
    array([16294208416658607535,  7960286522194355700], dtype=uint64)

    As floats in [0, 1):

    >>> (random_words(0, np.arange(2)) >> np.uint64(11)) * 2.0**-53
    array([0.88331081, 0.431528  ])
    """
    words = counters.astype(np.uint64)
    words *= np.uint64(_GOLDEN)
    words += np.uint64((key + _GOLDEN) & _MASK)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_MULTIPLIER_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MULTIPLIER_2)
    words ^= words >> np.uint64(31)
    return words


def derive_key(*parts: int) -> int:
    """Return a 64-bit key that depends on every part and on their order.

    Parameters
    ----------
    parts
        Integers of any size and sign, such as (seed, epoch, purpose). A strategy that draws for
        several purposes derives a key for each from its epoch's key.

    Returns
    -------
    A key, 0 <= key < 2**64, for `random_words`, `random_below`, `Permutation` or this function.

    Examples
    --------
    >>> epoch_key = derive_key(42, 3)
    >>> order_key, start_key = (derive_key(epoch_key, purpose) for purpose in range(2))
    """
    key = len(parts)
    for part in parts:
        remaining = part if part >= 0 else ~part
        key = _mix(key ^ (part < 0))
        while True:
            key = _mix(key ^ (remaining & _MASK))
            remaining >>= 64
            if not remaining:
                break
    return key


def random_below(key: int, bound: int) -> int:
    """Return an integer in [0, bound) that depends only on ``key``.

    The bias of the reduction is below bound / 2**64.

    Parameters
    ----------
    key
        A key that is used for nothing else; see `derive_key`.
    bound
        The exclusive upper bound, above 0.

    Examples
    --------
    >>> 0 <= random_below(derive_key(42), bound=10) < 10
    True
    """
    return (_mix(key) * bound) >> 64


def _mix(word: int) -> int:
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * _MULTIPLIER_1) & _MASK
    word = ((word ^ (word >> 27)) * _MULTIPLIER_2) & _MASK
    return word ^ (word >> 31)
