"""A pseudorandom permutation of range(n) in constant memory."""

import sys
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# Counter-based randomness: any draw of any stream is computed directly from its number.
#
# The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", OOPSLA 2014): word number ``c`` of the stream ``key`` is ``mix(key + c * golden)``.
# Unlike a NumPy ``Generator``, it has no state to carry or advance, and its output does not depend
# on NumPy's version.

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


# Four rounds make a Feistel network a pseudorandom permutation on large domains (Luby and
# Rackoff 1988). Small domains need more: with 8 rounds the 120 permutations of 5 elements are
# visibly uneven, with 16 they cannot be told from even (tests/loader/sampling/test_permutation.py).
_N_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection on range(n), evaluated element by element.

    A Feistel network permutes range(m), with m the smallest power of two that is at least ``n``. An
    image outside range(n) is permuted again until it falls inside ("cycle walking", Black and
    Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). At most half of the domain is
    outside, so at most two evaluations are expected.

    Parameters
    ----------
    n
        Number of elements, 0 <= n < 2**62.
    key
        Selects the permutation, 0 <= key < 2**64; see `derive_key`.

    Attributes
    ----------
    round_keys
        Keys of the rounds of the network, in order.

    Examples
    --------
    >>> permute = Permutation(1_000_000_000, key=7)
    >>> permute(np.array([[0, 1], [2, 999_999_999]])).shape
    (2, 2)
    >>> sorted(Permutation(5, key=7)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    n: int
    key: int
    round_keys: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive one key per round."""
        keys = tuple(derive_key(self.key, number) for number in range(_N_ROUNDS))
        object.__setattr__(self, "round_keys", keys)

    def __call__(self, elements: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the images of elements.

        Parameters
        ----------
        elements
            Values in [0, n), of any shape.

        Returns
        -------
        Values in [0, n), int64, in the shape of ``elements``.
        """
        words = elements.astype(np.uint64).ravel()
        # Processes that read cells have imported it; for a plan alone, the import would take longer
        # than it saves.
        kernels = sys.modules.get("cellfeed.sampling._kernels")
        if kernels is None:
            words = self._walked(words)
        else:
            keys, rounds = np.array(self.round_keys, np.uint64), np.arange(_N_ROUNDS)
            walking, places = np.empty(words.size, np.uint64), np.empty(words.size, np.int64)
            kernels.permute(words, words.size, walking, places, keys, rounds, self.n)
        return words.view(np.int64).reshape(elements.shape)

    def _walked(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        images = self._feistel(words)
        outside = np.flatnonzero(images >= self.n)
        while outside.size:
            walked = self._feistel(images[outside])
            images[outside] = walked
            outside = outside[walked >= self.n]
        return images

    def _feistel(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        n_bits = max(2, (self.n - 1).bit_length())
        low_bits = np.uint64(n_bits // 2)
        low_mask = np.uint64((1 << (n_bits // 2)) - 1)
        high_mask = np.uint64((1 << (n_bits - n_bits // 2)) - 1)
        high, low = words >> low_bits, words & low_mask
        for number, key in enumerate(self.round_keys):
            if number % 2:
                low ^= random_words(key, high) & low_mask
            else:
                high ^= random_words(key, low) & high_mask
        images: NDArray[np.uint64] = (high << low_bits) | low
        return images


def permute_within(
    elements: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return the image of each element under a permutation of its own range; see `Permutation`.

    Parameters
    ----------
    elements
        Values in [0, size).
    sizes
        Sizes of the ranges, above 0.
    keys
        Keys of the permutations.
    """
    images, outside = elements.astype(np.uint64), np.arange(elements.size)
    bits = np.maximum(2, np.ceil(np.log2(np.maximum(sizes, 2)))).astype(np.uint64)
    while outside.size:
        images[outside] = _feistel_of(images[outside], bits[outside], keys[outside])
        outside = outside[images[outside] >= sizes[outside].astype(np.uint64)]
    return images.astype(np.int64)


def _feistel_of(
    words: NDArray[np.uint64], n_bits: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    one, low_bits = np.uint64(1), n_bits // np.uint64(2)
    low_mask, high_mask = (one << low_bits) - one, (one << (n_bits - low_bits)) - one
    high, low = words >> low_bits, words & low_mask
    for number in range(_N_ROUNDS):
        if number % 2:
            low ^= random_words(number, keys ^ random_words(0, high)) & low_mask
        else:
            high ^= random_words(number, keys ^ random_words(0, low)) & high_mask
    images: NDArray[np.uint64] = (high << low_bits) | low
    return images
