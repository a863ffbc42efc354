"""`SamplingStrategy`, the base class of sampling strategies."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["ABSENT_BY_DEFAULT", "EpochOrder", "SamplingStrategy"]

ABSENT_BY_DEFAULT: Mapping[str, bool] = MappingProxyType({"absent by default": True})
"""Metadata of a dataclass field that states omit while it has its default value.

States that were saved before the field was added can then still be loaded.
"""


class EpochOrder(Protocol):
    """A function from the positions of one epoch to its rows."""

    def __call__(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the rows at the given positions of the epoch.

        The result depends only on the positions, not on earlier calls: any process may request any
        positions, at any time, in any order, and from several threads.

        Parameters
        ----------
        positions
            Values in [0, n_positions), int64, with one or more dimensions. Must not be modified.

        Returns
        -------
        Rows in [0, n_rows), int64, in the shape of ``positions``.
        """
        ...


class SamplingStrategy(ABC):
    """Base class of strategies, which choose the rows that an epoch visits, and their order.

    A strategy numbers the *positions* of an epoch, 0 .. n_positions - 1, and maps each of them to
    a row. It has no state and no random generator: all randomness is computed from a key
    (`derive_key`, `random_words`, `random_below`, `Permutation`). The `EpochPlan` divides the
    positions among ranks, worker processes, fetches and minibatches.

    A strategy must be picklable, since worker processes get a copy. The tests of
    `cellfeed.testing.StrategyConformance` check that a subclass fulfils this contract.

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
        """Whether the rows of a fetch are delivered in random order."""

    @property
    def n_together(self) -> int:
        """Number of consecutive positions that are delivered together and in order.

        Neither the shuffling of a fetch nor the end of a minibatch separates them, so
        ``n_positions`` and ``batch_size`` must be multiples of this number. The default is 1.
        """
        return 1

    @abstractmethod
    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch visits in a collection of ``n_rows`` rows.

        It must be the same in every epoch, and cheap, since it is needed before anything is read.

        Raises
        ------
        ParameterError
            The strategy does not fit this number of rows; for example, it visits rows beyond.
        """

    @abstractmethod
    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Prepare an epoch, and return the function that maps its positions to rows.

        This must be a pure function: the same arguments give the same order, in any process. An
        `EpochPlan` calls it at the first fetch and keeps the returned function for the whole
        epoch. Compute here what is needed once per epoch, such as sums of weights, and in the
        returned function what is needed for each fetch.

        Parameters
        ----------
        n_rows
            Number of rows of the collection.
        epoch_key
            64-bit key derived from the seed and the epoch.
        """

    def bound_to(self, collection: Any) -> "SamplingStrategy":  # noqa: ARG002 - for subclasses
        """Return this strategy with the data that it needs from the collection, such as labels.

        A `CellDataset` calls this once, when it is made. The fields of the returned strategy must
        determine the order completely. By default, this is the strategy itself.

        Parameters
        ----------
        collection
            The collection to be read.

        Raises
        ------
        ColumnError
            The collection has no such column.
        """
        return self

    def prepared_bytes(self, n_rows: int) -> int:  # noqa: ARG002 - for subclasses
        """Return how much memory the result of `epoch_order` takes, in bytes.

        Every reading process keeps one for each epoch in progress. Memory that does not grow with
        ``n_rows`` need not be counted. The default is 0.
        """
        return 0
