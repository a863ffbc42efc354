"""How well minibatches mix one label within another, such as the plate within the cell line.

``H(a | b) = H(a, b) - H(b)`` in each minibatch, over the cells that have both labels. Like any
plug-in estimate it is biased, and more than H(a) is, since a minibatch has fewer cells of each b:
hold it against the same estimate at random sampling, never against H(a | b) of the collection.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import ParameterError
from cellfeed_tuner._entropy._label_counts import as_codes, count_in_parts
from cellfeed_tuner._entropy._minibatch_entropy import entropies_of
from cellfeed_tuner._entropy._plan_replay import Statistic

__all__ = [
    "Conditional",
    "conditional_entropies_of",
    "conditional_statistic",
    "label_pair",
    "random_conditional_entropy_bits",
]

_MOST_PAIRS = np.iinfo(np.int64).max

_Codes = NDArray[np.integer]


class Conditional(NamedTuple):
    """One label given another, in place of a label whose entropy is asked for.

    Parameters
    ----------
    labels
        Code of each row's label in the order of storage, -1 where missing, shape (n_rows,).
    given
        Code of the label within which the first is to be mixed, likewise.
    """

    labels: ArrayLike
    given: ArrayLike


def conditional_statistic(labels: _Codes, given: _Codes) -> Statistic:
    """Return what gives H(labels | given) of minibatches from their rows; see `label_pair`."""
    n_given = int(given.max()) + 1

    def conditional(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return conditional_entropies_of(labels[rows], given[rows], n_given)

    return conditional


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
        found = count_in_parts(lambda part: codes(first[part], second[part]), first.size, most)
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
