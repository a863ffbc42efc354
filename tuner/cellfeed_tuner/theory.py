"""Label entropy of minibatches, from the label frequencies alone.

There are K labels with frequencies p, minibatches of m rows, blocks of b rows, and f minibatches to
a fetch. Entropies are plug-in estimates over one minibatch, in bits. Such an estimate is biased
downwards, so compare it with another estimate over as many rows, never with H(p).

Blocks of unequal sizes s mix like equal blocks of the effective size E[s^2] / E[s], the mean size
of the block that contains a row. If blocks draw their labels independently from p, the rows of a
label in whole blocks of sizes s_i have the variance p (1 - p) sum s_i^2, and m rows contain blocks
with sum s_i^2 = m E[s^2] / E[s] on average. The first-order bias of the plug-in entropy of counts
n_k is sum Var(n_k) / (2 m^2 p_k ln 2) (Paninski, "Estimation of entropy and mutual information",
Neural Computation 2003), so it depends on sizes only through this sum. `BlockShuffling` gives the
effective size of its blocks: ``block_sizes(n_rows).effective``.
"""

from collections.abc import Callable
from math import gcd, log
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import ParameterError

__all__ = [
    "entropy_bits",
    "expected_entropy_bits",
    "independent_entropy_bits",
    "lower_bound_bits",
    "random_entropy_bits",
    "upper_bound_bits",
]

# Sums omit states of a label's block count that are less likely than this.
_NEGLIGIBLE = 1e-15
# Number of terms of a sum in memory at a time.
_TERMS_AT_ONCE = 1 << 18
# Sums omit hypergeometric counts that are further from their mean, in standard deviations.
_DEVIATIONS = 12


def entropy_bits(p: ArrayLike) -> float:
    """Return the Shannon entropy of a distribution, ``-sum p log2 p``, in bits.

    Parameters
    ----------
    p
        Frequencies or counts, not negative, shape (K,); need not sum to one.

    Raises
    ------
    ParameterError
        ``p`` is empty, negative or all zero.

    Examples
    --------
    >>> entropy_bits([1, 1, 1, 1])
    2.0
    """
    frequencies = _frequencies(p)
    return float(_surprise(frequencies).sum())


def upper_bound_bits(p: ArrayLike, batch_size: int) -> float:
    """Return the paper's upper bound: random sampling, or an infinite fetch.

    ``H(p) - (K - 1) / (2 m ln 2)``, with the first-order bias of the plug-in estimate (Paninski,
    "Estimation of entropy and mutual information", Neural Computation 2003). This expansion is
    loose unless m is large against K; `random_entropy_bits` is exact.

    Parameters
    ----------
    p
        Label frequencies or counts, shape (K,).
    batch_size
        Rows of a minibatch.

    Examples
    --------
    >>> round(upper_bound_bits([1, 1], batch_size=64), 4)
    0.9887
    """
    return _first_order_bits(p, batch_size, block_size=1)


def lower_bound_bits(p: ArrayLike, batch_size: int, block_size: float) -> float:
    """Return the paper's lower bound: one minibatch to a fetch, so m / b independent blocks.

    ``H(p) - (K - 1) b / (2 m ln 2)``, and 0 if b >= m, where a minibatch may lie within one block.
    This expansion in b / m is loose if a minibatch contains few blocks: for two blocks of two
    labels, the exact entropy is 0.5 bits, and this is 0.64; `expected_entropy_bits` is exact.

    Parameters
    ----------
    p
        Label frequencies or counts, shape (K,).
    batch_size
        Rows of a minibatch.
    block_size
        Rows of a block; the effective size if blocks are unequal.

    Examples
    --------
    >>> lower_bound_bits([1, 1], batch_size=64, block_size=64)
    0.0
    """
    bits = _first_order_bits(p, batch_size, block_size)
    return 0.0 if block_size >= batch_size else bits


def random_entropy_bits(counts: ArrayLike, batch_size: int, *, n_missing: int = 0) -> float:
    """Return the exact expected entropy of minibatches drawn at random without replacement.

    Parameters
    ----------
    counts
        Rows of each label, integers, shape (K,).
    batch_size
        Rows of a minibatch; all rows if there are fewer.
    n_missing
        Rows without a label, which are drawn but do not count in the entropy.

    Examples
    --------
    >>> random_entropy_bits([1, 1], batch_size=2)
    1.0
    """
    rows = np.asarray(counts, dtype=np.float64)
    _frequencies(rows)
    distinct, n_labels = np.unique(rows, return_counts=True)
    n_labelled = int(rows.sum())
    drawn = min(batch_size, n_labelled + n_missing)
    # The number of rows with a label in a minibatch is hypergeometric.
    known = np.arange(1, min(drawn, n_labelled) + 1)
    probability = _distributions().hypergeom.pmf(known, n_labelled + n_missing, n_labelled, drawn)
    return float(
        sum(
            share * (n_labels @ _contribution(distinct, n_labelled, int(n)))
            for n, share in zip(known, probability, strict=True)
            if share > _NEGLIGIBLE
        )
    )


def expected_entropy_bits(
    p: ArrayLike,
    batch_size: int,
    block_size: float,
    fetch_factor: int,
    *,
    n_rows: int | None = None,
) -> float:
    """Return the exact expected entropy if every block has one label.

    Blocks draw their labels independently from p, as in a collection of many homogeneous
    blocks. A fetch covers m f consecutive rows of the shuffled blocks; a block that straddles
    two fetches is split. So the rows of a label in a fetch are b times a binomial count, plus
    the rows of split blocks; given these, a minibatch is a hypergeometric draw. The expected
    entropy is the sum over labels of the expectation of ``-x log2 x``, x = n_k / m.

    Parameters
    ----------
    p
        Label frequencies or counts, shape (K,).
    batch_size
        Rows of a minibatch.
    block_size
        Rows of a block. If blocks are unequal, their effective size, for which the expectation is
        not exact. It need not be whole: between whole sizes, the expectation is interpolated.
    fetch_factor
        Minibatches of a fetch.
    n_rows
        Rows of the collection, to account for a short last block. It has a random place in an
        epoch's order, and shifts the boundaries of all later blocks: of half the fetches, on
        average over epochs.

    Examples
    --------
    >>> round(expected_entropy_bits([1] * 14, batch_size=64, block_size=16, fetch_factor=1), 3)
    1.792
    """
    whole = int(block_size)
    if whole != block_size:
        of_sizes = [
            expected_entropy_bits(p, batch_size, size, fetch_factor, n_rows=n_rows)
            for size in (max(1, whole), whole + 1)
        ]
        return float(np.interp(block_size, [whole, whole + 1], of_sizes))
    block_size = whole
    distinct, n_labels = np.unique(_frequencies(p), return_counts=True)
    fetch_size = batch_size * fetch_factor
    if distinct.size == 1 and n_labels[0] == 1:
        return 0.0
    # Rows of the first block that belong to the fetch before, as often as each occurs.
    offsets = np.arange(0, block_size, gcd(fetch_size, block_size))
    if n_rows is not None:
        offsets = np.concatenate([offsets, (offsets - n_rows) % block_size])
    # All sizes are multiples of the step, and are in steps from here on.
    step = int(np.gcd.reduce([fetch_size, block_size, *offsets]))
    fetch, block = fetch_size // step, block_size // step
    heads = -(offsets // step) % block
    # A fetch within one block has one label, and an entropy of 0.
    heads = heads[heads < fetch]

    def contribution(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return _contribution(rows * step, fetch_size, batch_size)

    total = 0.0
    n_blocks_of = (fetch - heads) // block
    for n_blocks in np.unique(n_blocks_of):
        alike = heads[n_blocks_of == n_blocks]
        total += float(
            n_labels @ _bits_by_label(distinct, fetch, block, int(n_blocks), alike, contribution)
        )
    return total / offsets.size


def independent_entropy_bits(p: ArrayLike, batch_size: int, *, n_missing: int = 0) -> float:
    """Return the exact expected entropy of minibatches whose rows are drawn with replacement.

    The reference for a weighted strategy: the counts of labels in a minibatch are multinomial.

    Parameters
    ----------
    p
        How often each label is drawn, shape (K,); if it is empty, 0 is returned.
    batch_size
        Rows of a minibatch.
    n_missing
        How often rows without a label are drawn, which do not count in the entropy.

    Examples
    --------
    >>> round(independent_entropy_bits([1, 1], batch_size=2), 6)
    0.5
    """
    drawn = np.asarray(p, dtype=np.float64)
    if not drawn.size:
        return 0.0
    share_known = 1.0 if not n_missing else float(drawn.sum() / (drawn.sum() + n_missing))
    known = np.arange(1, batch_size + 1)
    probability = _distributions().binom.pmf(known, batch_size, share_known)
    return float(
        sum(
            share * expected_entropy_bits(drawn, int(n), block_size=1, fetch_factor=1)
            for n, share in zip(known, probability, strict=True)
            if share > _NEGLIGIBLE
        )
    )


def _frequencies(p: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(p, dtype=np.float64)
    if values.ndim != 1 or not np.all(values >= 0) or not 0 < values.sum() < np.inf:
        msg = f"`p` must be frequencies, not negative and not all zero, but got {p!r}"
        raise ParameterError(msg)
    present = values[values > 0]
    frequencies: NDArray[np.float64] = present / present.sum()
    return frequencies


def _first_order_bits(p: ArrayLike, batch_size: int, block_size: float) -> float:
    frequencies = _frequencies(p)
    for name, value in (("batch_size", batch_size), ("block_size", block_size)):
        if not value > 0:
            raise ParameterError(f"`{name} > 0` must hold, but got {name}={value!r}")
    bias = (frequencies.size - 1) * block_size / (2 * batch_size * log(2))
    return max(0.0, entropy_bits(frequencies) - bias)


def _surprise(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``-x log2 x``, which is 0 at 0."""
    surprise: NDArray[np.float64] = -x * np.log2(np.where(x > 0, x, 1.0))
    return surprise


def _bits_by_label(
    p: NDArray[np.float64],
    fetch: int,
    block: int,
    n_blocks: int,
    heads: NDArray[np.int64],
    contribution: Callable[[NDArray[np.int64]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Return each label's expected part of the entropy, summed over fetches of so many blocks.

    Such a fetch has ``n_blocks`` whole blocks between the last rows of one block, ``heads`` of
    them, and the first rows of another. Either part may have the label, so a label of j whole
    blocks has j b rows, and none, one or both parts. Their contributions do not depend on p, so
    they are summed over the fetches first.
    """
    split = fetch - n_blocks * block  # rows of both parts together
    whole, probability = _binomial_states(n_blocks, p)
    states, place = np.unique(whole, return_inverse=True)
    table = np.full(fetch + 1, np.nan)
    parts = np.unique(np.concatenate([heads, split - heads, [0, split]]))
    needed = np.zeros(table.size, dtype=bool)
    needed[states[:, None] * block + parts] = True
    table[needed] = contribution(np.flatnonzero(needed))
    rows = states * block
    neither = heads.size * table[rows]
    both = heads.size * table[rows + split]
    one = np.array([table[row + heads].sum() + table[row + split - heads].sum() for row in rows])
    given_states = np.stack([neither, one, both])[:, place.reshape(whole.shape)]
    chances = np.stack([(1 - p) ** 2, p * (1 - p), p**2])
    bits: NDArray[np.float64] = np.einsum("cl,cls,ls->l", chances, given_states, probability)
    return bits


def _distributions() -> Any:
    """Return SciPy's distributions, whose import takes a second."""
    from scipy import stats  # noqa: PLC0415

    return stats


def _binomial_states(
    n: int, p: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the likely counts of binomial(n, p) and their probabilities, for each p."""
    binom = _distributions().binom
    low = np.asarray(binom.ppf(_NEGLIGIBLE, n, p), dtype=np.int64).clip(0)
    high = np.asarray(binom.isf(_NEGLIGIBLE, n, p), dtype=np.int64)
    counts = low[:, None] + np.arange((high - low).max() + 1)
    return counts.clip(max=n), np.where(counts <= n, binom.pmf(counts, n, p[:, None]), 0.0)


def _contribution(
    rows: NDArray[np.floating] | NDArray[np.integer], n_rows: int, batch_size: int
) -> NDArray[np.float64]:
    """Return E[-x log2 x], x = n / m, n hypergeometric, for each label's rows, ascending."""
    result = np.empty(rows.size)
    states_at_once = max(1, _TERMS_AT_ONCE // (batch_size + 1))
    for start in range(0, rows.size, states_at_once):
        part = slice(start, start + states_at_once)
        result[part] = _hypergeometric_surprise(
            rows[part].astype(np.float64)[:, None], n_rows, batch_size
        )
    return result


def _hypergeometric_surprise(
    rows: NDArray[np.float64], n_rows: int, batch_size: int
) -> NDArray[np.float64]:
    # ``rows`` ascend, so that neighbours share a short range of counts.
    mean = batch_size * rows / n_rows
    spread = _DEVIATIONS * (np.sqrt(mean) + 1)
    low = max(0.0, np.floor((mean - spread).min()))
    n = np.arange(low, min(batch_size, float((mean + spread).max())) + 1)
    possible = (n <= rows) & (batch_size - n <= n_rows - rows)
    log_probability = np.where(
        possible, _log_choose(rows, n) + _log_choose(n_rows - rows, batch_size - n), -np.inf
    )
    # Normalised twice, against the cancellation of large logarithms.
    probability = np.exp(log_probability - log_probability.max(axis=1, keepdims=True))
    probability /= probability.sum(axis=1, keepdims=True)
    expectation: NDArray[np.float64] = probability @ _surprise(n / batch_size)
    return expectation


def _log_choose(n: NDArray[np.float64], k: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.special import gammaln  # noqa: PLC0415 - reading results needs no SciPy

    inside = (k >= 0) & (k <= n)
    rest = np.where(inside, n - k, 0)
    logarithm: NDArray[np.float64] = gammaln(n + 1) - gammaln(k + 1) - gammaln(rest + 1)
    return logarithm
