"""Label counts, and the label entropy of known minibatches and of blocks.

The mixing of one label within another, such as the plate within the cell line, is
``H(a | b) = H(a, b) - H(b)`` in each minibatch, over the cells that have both labels. This plug-in
estimate has a bias, larger than that of H(a), since a minibatch has fewer cells of each b: compare
it with the same estimate for random sampling, never with H(a | b) of the collection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import EpochPlan, ParameterError
from cellfeed_tuner import theory
from cellfeed_tuner._entropy._plan_replay import Statistic, minibatches_by_fetch

__all__ = [
    "Conditional", "LabelCounts", "as_codes", "conditional_entropies_of", "count_labels",
    "entropies_of", "label_pair", "minibatch_entropies", "random_conditional_entropy_bits",
    "random_of_known_statistic", "require_a_label_for_each", "statistic_of", "within_block_bits",
]  # fmt: skip

# Rows of blocks whose entropies are computed together.
_ROWS_AT_ONCE = 1 << 17
# Rows that are counted at a time; NumPy needs 8 bytes for each.
_ROWS_PER_PART = 1 << 20
_MOST_PAIRS = np.iinfo(np.int64).max

_Codes = NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class LabelCounts:
    """Rows of each occurring label, int64, shape (n_labels,), and rows without a label."""

    counts: NDArray[np.int64]
    n_missing: int

    @property
    def n_rows(self) -> int:
        """All rows."""
        return int(self.counts.sum()) + self.n_missing

    def random_entropy_bits(self, batch_size: int) -> float:
        """Return the exact expectation of random sampling; 0 if no row has a label."""
        if not self.counts.size:
            return 0.0
        return theory.random_entropy_bits(self.counts, batch_size, n_missing=self.n_missing)


def count_labels(codes: NDArray[np.integer]) -> LabelCounts:
    """Count each label from codes, negative where missing, shape (n_rows,).

    Memory does not grow with the number of rows, unless codes are far larger than that number; they
    are then sorted.
    """
    return _count_in_parts(lambda part: codes[part], codes.size, int(codes.max(initial=-1)))


def _count_in_parts(
    codes_in: Callable[[slice], NDArray[np.integer]], n_rows: int, most: int
) -> LabelCounts:
    """Count labels whose codes a function makes in parts; see `count_labels`."""
    if most > max(_ROWS_PER_PART, n_rows):
        found, counted = np.unique(codes_in(slice(0, n_rows)), return_counts=True)
        return LabelCounts(counted[found >= 0], int(counted[found < 0].sum()))
    counts = np.zeros(most + 2, dtype=np.int64)
    at_once = max(_ROWS_PER_PART, most)
    for start in range(0, n_rows, at_once):
        part = codes_in(slice(start, start + at_once)).astype(np.int64)
        counts += np.bincount(np.maximum(part, -1) + 1, minlength=counts.size)
    return LabelCounts(counts[1:][counts[1:] > 0], int(counts[0]))


def as_codes(labels: ArrayLike) -> NDArray[np.integer]:
    """Return labels as one-dimensional integer codes, or raise `ParameterError`."""
    codes = np.asarray(labels)
    if codes.ndim != 1 or codes.size == 0 or codes.dtype.kind not in "iu":
        msg = (
            "`labels` must be one-dimensional integer codes, at least one, "
            f"but got shape {codes.shape} and dtype {codes.dtype}"
        )
        raise ParameterError(msg)
    return codes


def require_a_label_for_each(codes: NDArray[np.integer], n_rows: int) -> None:
    """Raise `ParameterError` if there are not as many labels as rows."""
    if codes.size != n_rows:
        msg = f"there must be a label for each of {n_rows:,} rows, but there are {codes.size:,}"
        raise ParameterError(msg)


class Conditional(NamedTuple):
    """A label within each value of another, to pass instead of a label.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, -1 where missing, shape (n_rows,).
    given
        Code of the other label, likewise.
    """

    labels: ArrayLike
    given: ArrayLike


def statistic_of(labels: "ArrayLike | Conditional") -> tuple[Statistic, int]:
    """Return a function from rows to entropies of minibatches, and the number of labels.

    Raises
    ------
    ParameterError
        Labels are not one-dimensional integers, or differ in length.
    """
    if not isinstance(labels, Conditional):
        codes = as_codes(labels)
        return (lambda rows: entropies_of(codes[rows])), codes.size
    first, given = label_pair(*labels)
    n_given = int(given.max()) + 1
    return (lambda rows: conditional_entropies_of(first[rows], given[rows], n_given)), first.size


def minibatch_entropies(labels: ArrayLike, plan: EpochPlan) -> NDArray[np.float64]:
    """Return the entropy of every full minibatch of an epoch, in the order of delivery.

    Parameters
    ----------
    labels
        Code of each row's label, integers, -1 where it is missing, shape (plan.n_rows,).
    plan
        The epoch.

    Returns
    -------
    Entropies in bits, shape (number of full minibatches,).
    """
    codes = as_codes(labels)
    parts = [
        entropies_of(codes[rows.reshape(-1, rows.shape[-1])]) for rows in minibatches_by_fetch(plan)
    ]
    return np.concatenate([np.empty(0), *parts])


def entropies_of(minibatches: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the plug-in entropy of each minibatch in bits, 0 if it has no label.

    Takes codes, -1 where missing, shape (n_minibatches, batch_size).
    """
    labels = np.sort(minibatches, axis=1)
    # H = log2 n - (1 / n) sum c log2 c over the runs of equal labels, c long, n known labels
    starts = np.ones(labels.shape, dtype=bool)
    starts[:, 1:] = labels[:, 1:] != labels[:, :-1]
    places = np.flatnonzero(starts)
    lengths = np.diff(places, append=labels.size)
    lengths[labels.ravel()[places] < 0] = 0
    weighted = lengths * np.log2(np.maximum(lengths, 1))
    minibatch = places // labels.shape[1]
    total = np.bincount(minibatch, weights=weighted, minlength=len(labels))
    known = np.maximum(1, np.bincount(minibatch, weights=lengths, minlength=len(labels)))
    entropies: NDArray[np.float64] = np.maximum(0.0, np.log2(known) - total / known)
    return entropies


def within_block_bits(codes: NDArray[np.integer], block_size: int) -> float:
    """Return the mean plug-in entropy of blocks, weighted by their rows, with a short last block.

    Takes codes, block after block; uses the memory of about 100,000 rows, or of one larger block.

    Examples
    --------
    >>> sorted_labels = np.repeat([0, 1, 2, 3], 300)
    >>> [round(within_block_bits(sorted_labels, size), 3) for size in (10, 400)]
    [0.0, 0.874]
    """
    at_once = max(1, _ROWS_AT_ONCE // block_size) * block_size
    whole = codes.size - codes.size % block_size
    parts: list[NDArray[np.integer]] = np.split(codes, [*range(at_once, whole, at_once), whole])
    *of_whole, short = parts
    total = sum(float(entropies_of(each.reshape(-1, block_size)).sum()) for each in of_whole)
    in_short = float(entropies_of(short[None])[0]) if short.size else 0.0
    return (total * block_size + in_short * short.size) / codes.size


def random_of_known_statistic(codes: NDArray[np.integer], counts: NDArray[np.int64]) -> Statistic:
    """Return a function from minibatches to the entropy of random samples with as many labels.

    ``counts`` are the rows of each label, shape (n_labels,).

    Examples
    --------
    >>> random = random_of_known_statistic(np.array([0, 1, -1, -1]), np.array([1, 1]))
    >>> random(np.array([[0, 1], [0, 2], [2, 3]]))
    array([1., 0., 0.])
    """

    @cache
    def bits(n_known: int) -> float:
        return theory.random_entropy_bits(counts, n_known) if n_known else 0.0

    def random_of_known(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        known, place = np.unique((codes[rows] >= 0).sum(axis=1), return_inverse=True)
        found: NDArray[np.float64] = np.array([bits(n) for n in known.tolist()])[place]
        return found

    return random_of_known


def conditional_entropies_of(
    labels: _Codes, given: _Codes, n_given: int | None = None
) -> NDArray[np.float64]:
    """Return H(labels | given) of each row of codes, -1 where missing, in bits, shape (n_rows,)."""
    joint = entropies_of(_joint(labels, given, n_given or int(given.max()) + 1))
    bits: NDArray[np.float64] = joint - entropies_of(_known_in_both(labels, given))
    return bits


def random_conditional_entropy_bits(labels: ArrayLike, given: ArrayLike, batch_size: int) -> float:
    """Return the exact expectation of H(labels | given) in minibatches drawn at random.

    Examples
    --------
    >>> random_conditional_entropy_bits([0, 0, 1, 1], [0, 1, 0, 1], batch_size=4)
    1.0
    """
    first, second = label_pair(labels, given)
    n_given = int(second.max()) + 1
    n_pairs = (int(first.max()) + 1) * n_given

    def bits(codes: Callable[[_Codes, _Codes], _Codes], most: int) -> float:
        found = _count_in_parts(lambda part: codes(first[part], second[part]), first.size, most)
        return found.random_entropy_bits(batch_size)

    return bits(lambda a, b: _joint(a, b, n_given), n_pairs - 1) - bits(_known_in_both, n_given - 1)


def label_pair(labels: ArrayLike, given: ArrayLike) -> tuple[_Codes, _Codes]:
    """Return two labels as codes, whose pairs fit into 63 bits, or raise `ParameterError`."""
    first, second = as_codes(labels), as_codes(given)
    if first.size != second.size:
        msg = f"labels must have as many rows as `given`, but got {first.size} and {second.size}"
        raise ParameterError(msg)
    n_pairs = (int(first.max()) + 1) * (int(second.max()) + 1)
    if n_pairs > _MOST_PAIRS:
        msg = f"`n_labels * n_given < 2**63` must hold, but got {n_pairs}; number labels from 0"
        raise ParameterError(msg)
    return first, second


def _joint(first: _Codes, second: _Codes, n_given: int) -> NDArray[np.signedinteger]:
    largest = int(first.max(initial=0)) * n_given + n_given
    joint: NDArray[np.signedinteger] = first.astype(np.min_scalar_type(-1 - largest))
    np.multiply(joint, n_given, out=joint)
    np.add(joint, second, out=joint, casting="unsafe")
    joint[(first < 0) | (second < 0)] = -1
    return joint


def _known_in_both(first: _Codes, second: _Codes) -> NDArray[np.signedinteger]:
    return np.where(first < 0, -1, second)
