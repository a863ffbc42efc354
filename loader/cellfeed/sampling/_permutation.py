"""A pseudorandom permutation of range(n) in constant memory."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellfeed.sampling._compiled import compiled
from cellfeed.sampling._random import derive_key, random_words

__all__ = ["Permutation", "permute_within"]

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
        permute = compiled("_permute", "permute")
        if permute is None:
            words = self._walked(words)
        else:
            keys = np.array(self.round_keys, np.uint64)
            permute(words, words.size, keys, np.arange(_N_ROUNDS), self.n)
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
