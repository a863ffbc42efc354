"""What a sampling strategy is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["ABSENT_BY_DEFAULT", "EpochOrder", "SamplingStrategy"]

ABSENT_BY_DEFAULT: Mapping[str, bool] = MappingProxyType({"absent by default": True})
"""Metadata of a dataclass field that states do not name while it has its default.

States that were saved before there was such a field can be read then.
"""


class EpochOrder(Protocol):
    """The rows of one epoch, by their positions; any function that maps one to the other."""

    def __call__(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the rows at the given positions of the epoch.

        Depends on the positions alone, not on what was asked for before: any process asks for
        any of them, at any time, in any order, and from several threads.

        Parameters
        ----------
        positions
            Values in [0, n_positions), int64, of one or more dimensions. Not to be written into.

        Returns
        -------
        Rows in [0, n_rows), int64, in the shape of ``positions``.
        """
        ...


class SamplingStrategy(ABC):
    """Which rows an epoch visits, and in which order; derive from it to write another.

    A strategy numbers the *positions* of an epoch, 0 .. n_positions - 1, and maps any of them to
    a row. It has no state and draws nothing from a generator: all that is random follows from a
    key (`derive_key`, `random_words`, `random_below`, `Permutation`). Ranks, worker processes,
    fetches and minibatches are the plan's business (`EpochPlan`), which divides the positions.

    It has to be picklable, since worker processes get a copy. Whether it fulfils what is asked
    here is tested by `cellfeed.testing.StrategyConformance`.

    Examples
    --------
    >>> from cellfeed.sampling import Permutation
    >>> class SingleCells(SamplingStrategy):
    ...     shuffles_fetch = False
    ...
    ...     def n_positions(self, n_rows):
    ...         return n_rows
    ...
    ...     def epoch_order(self, *, n_rows, epoch_key):
    ...         return Permutation(n_rows, epoch_key)
    >>> order = SingleCells().epoch_order(n_rows=5, epoch_key=1)
    >>> sorted(order(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    @property
    @abstractmethod
    def shuffles_fetch(self) -> bool:
        """Whether the rows of one fetch leave in random order."""

    @property
    def n_together(self) -> int:
        """How many consecutive positions are delivered together and in order.

        Neither the shuffling of a fetch nor the end of a minibatch separates them, so that
        ``n_positions`` and ``batch_size`` have to be multiples of it. 1 unless a strategy says
        otherwise.
        """
        return 1

    @abstractmethod
    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch over ``n_rows`` rows visits.

        It is the same in every epoch, and cheap: lengths are asked for before anything is read.

        Raises
        ------
        ParameterError
            The strategy does not fit so many rows, such as one that asks for rows beyond.
        """

    @abstractmethod
    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Prepare an epoch, and return what maps its positions to rows.

        A pure function: the same arguments give the same order, in any process. An `EpochPlan`
        calls it at its first fetch and keeps what is returned as long as it lives, so what is
        worth doing once an epoch is done here (such as summing weights) and what every fetch
        needs anew in the function that is returned.

        Parameters
        ----------
        n_rows
            Number of rows of the collection.
        epoch_key
            64 bits that stand for (seed, epoch).
        """

    def bound_to(self, collection: Any) -> "SamplingStrategy":  # noqa: ARG002 - for subclasses
        """Return this strategy with what it is to take from the collection, such as labels.

        A `CellDataset` calls it once, when it is made. What it returns has everything that fixes
        the order in its fields; the strategy itself unless a subclass says otherwise.

        Parameters
        ----------
        collection
            What is read.

        Raises
        ------
        ColumnError
            The collection has no such column.
        """
        return self

    def prepared_bytes(self, n_rows: int) -> int:  # noqa: ARG002 - for subclasses
        """Return how much memory an `epoch_order` takes while it is kept, in bytes.

        Every process that reads keeps one for each epoch under way. What does not grow with
        ``n_rows`` need not be counted; 0 unless a strategy says otherwise.
        """
        return 0
