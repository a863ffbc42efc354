"""`SamplingStrategy`, the base class of sampling strategies."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import ParameterError, require_integer, require_positive

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


class MatchedOrder(EpochOrder, Protocol):
    """An order of rows, each with companions; see `SamplingStrategy.n_companions`."""

    def companions(self, positions: NDArray[np.int64], *, together: int) -> NDArray[np.int64]:
        """Return the companions of the rows at the given positions of the epoch.

        The result depends only on the arguments, as that of `EpochOrder`.

        Parameters
        ----------
        positions
            See `EpochOrder`.
        together
            Positions ``n * together`` to ``(n + 1) * together - 1`` are read together, for any n,
            unless ranks or a resumed run divide an epoch otherwise. Others that are stored side by
            side are read fast if they are drawn for positions that are read together.

        Returns
        -------
        Rows in [0, n_rows), int64, shape ``(*positions.shape, n_companions)``.
        """
        ...


class SamplingStrategy(ABC):
    """Base class of strategies, which choose the rows that an epoch visits, and their order.

    A strategy numbers the *positions* of an epoch, 0 .. n_positions - 1, and maps each of them to
    a row. It has no state and no random generator: all randomness is computed from a key
    (`derive_key`, `random_words`, `random_below`, `Permutation`). The `EpochPlan` divides the
    positions among ranks, worker processes, fetches and minibatches.

    Rows may have companions (`n_companions`), in minibatches ``minibatch.controls`` or
    ``minibatch.neighbors``: the name is the attribute ``companion_name`` of the strategy.

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

    companion_name: ClassVar[Literal["controls", "neighbors"]] = "controls"

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

    @property
    def n_companions(self) -> int:
        """Number of other rows that come with each row, such as controls; 0 by default.

        If above 0, `epoch_order` returns a `MatchedOrder`.
        """
        return 0

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

    def identity(self) -> Any:
        """Return what distinguishes this strategy from others of its class, as JSON values.

        Numbers, strings, arrays, and lists and dictionaries of them. A state has it, so that it is
        refused where another strategy goes on. By default None: then the attributes are used.
        """
        return None


class WithOthers(SamplingStrategy):
    """A strategy whose cells another one chooses, and with which others come."""

    strategy: SamplingStrategy
    block_size: int | None

    @property
    def indices(self) -> NDArray[np.int64] | None:
        """The rows that the strategy may visit; None if it has no ``indices``."""
        found: NDArray[np.int64] | None = getattr(self.strategy, "indices", None)
        return found

    @property
    def shuffles_fetch(self) -> bool:
        """Whether the strategy's cells are mixed in memory."""
        return self.strategy.shuffles_fetch

    @property
    def n_together(self) -> int:
        """Number of cells that the strategy keeps together."""
        return self.strategy.n_together

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _take_block_size(self) -> None:
        """Give the block size to the strategy, or take that of the strategy."""
        own = getattr(self.strategy, "block_size", None)
        if self.block_size is None:
            self._set(block_size=own)
        elif own not in (None, self.block_size):
            self._set(strategy=replace(cast(Any, self.strategy), block_size=self.block_size))


# The sizes of blocks.


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes of the blocks of an epoch, in rows.

    Parameters
    ----------
    n_blocks
        Number of blocks.
    mean, largest
        Mean and largest size.
    effective
        Mean size, over rows, of the block that a row is in: ``E[s^2] / E[s]`` for block sizes s.
        Blocks of this one size would mix equally well; see
        `cellfeed_tuner.theory.lower_bound_bits`.
    """

    n_blocks: int
    mean: float
    largest: int
    effective: float


# The rows that a strategy may visit: all rows, or the given indices.


def has_masked(values: Any) -> bool:
    """Return whether values of a NumPy array are masked, which `numpy.asarray` unmasks."""
    return isinstance(values, np.ma.MaskedArray) and bool(np.ma.is_masked(values))


def require_row_numbers(indices: ArrayLike) -> NDArray[Any]:
    """Return the numbers of rows, one-dimensional integers, at least one.

    Raises
    ------
    ParameterError
        They are none.
    """
    if has_masked(indices):
        raise ParameterError("`indices` are masked; give `indices.compressed()`")
    given = np.asarray(indices)
    if given.ndim == 1 and given.size and given.dtype.kind in "iu":
        return given
    msg = (
        "`indices` must be one-dimensional integers, at least one, "
        f"but got shape {given.shape} and dtype {given.dtype}"
    )
    if given.dtype.kind == "U" and not given.ndim:
        msg += "; write `collection.where(query)`"
    elif given.dtype.kind == "b":
        msg += "; write `np.flatnonzero(mask)`"
    elif given.size == 0:
        msg += "; if they are of `collection.where(query)`, no cell matches the query"
    raise ParameterError(msg)


def sorted_indices(indices: ArrayLike | None) -> NDArray[np.int64] | None:
    """Return the rows to visit, checked and in storage order; None for all rows.

    ``__post_init__`` of a strategy calls this, and warnings point to the caller of its caller.

    Raises
    ------
    ParameterError
        The indices are not one-dimensional non-negative integers, or there are none.

    Warns
    -----
    UserWarning
        The indices were not sorted.
    """
    if indices is None:
        return None
    rows = require_row_numbers(indices).astype(np.int64)
    if np.any(rows[1:] < rows[:-1]):
        warnings.warn(
            (
                "`indices` were not sorted; they are read in sorted order, so sort them to "
                "silence this warning"
            ),
            UserWarning,
            stacklevel=4,
        )
        rows = np.sort(rows)
    if rows[0] < 0:
        msg = f"`indices >= 0` must hold, but the smallest is {rows[0]}"
        raise ParameterError(msg)
    return rows


def n_available(indices: ArrayLike | None, n_rows: int) -> int:
    """Return how many rows may be visited.

    Raises
    ------
    ParameterError
        A row is beyond the collection.
    """
    if indices is None:
        return n_rows
    rows = np.asarray(indices)
    if rows[-1] >= n_rows:
        msg = f"`indices < {n_rows}` (the number of rows) must hold, but the largest is {rows[-1]}"
        raise ParameterError(msg)
    return rows.size


def among(indices: ArrayLike | None, order: EpochOrder) -> EpochOrder:
    """Return an order of rows, from an order of their numbers among ``indices``."""
    if indices is None:
        return order
    rows: NDArray[np.int64] = np.asarray(indices)
    return lambda positions: rows[order(positions)]


# How the rows of a file are divided into chunks.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedRows:
    """The rows of one file, stored consecutively in chunks that are decompressed as a whole.

    Parameters
    ----------
    n_rows
        Number of rows.
    chunk_size
        Elements in a chunk; 0 if rows are not in such chunks, so that any row may begin a block.
    row_size
        Elements in each row, if all rows have equally many.
    pointer
        Otherwise, the first element of each row, ascending, int64, shape (n_rows + 1,).
    """

    n_rows: int
    chunk_size: int = 0
    row_size: int = 0
    pointer: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Check the row pointers, and convert them for compiled code."""
        if self.pointer is not None:
            pointer = np.ascontiguousarray(self.pointer, np.int64)
            object.__setattr__(self, "pointer", pointer)
            if pointer.shape != (self.n_rows + 1,):
                msg = (
                    f"`pointer` must have {self.n_rows + 1} values, one more than rows, but got "
                    f"shape {pointer.shape}"
                )
                raise ParameterError(msg)

    def first_from(self, rows: NDArray[np.int64], before: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each row that begins in another chunk than one before, else the next that does.

        Parameters
        ----------
        rows
            Ascending rows of this file.
        before
            A row before each, which is negative in an earlier file.

        Returns
        -------
        Rows, and ``n_rows`` where none follows that begins in a later chunk.
        """
        if not self.chunk_size:
            return rows

        def starts(of: NDArray[np.int64]) -> NDArray[np.int64]:
            return of * self.row_size if self.pointer is None else self.pointer[of]

        begin = starts(rows) // self.chunk_size * self.chunk_size
        if self.pointer is None:
            later = np.minimum(self.n_rows, -(-(begin + self.chunk_size) // self.row_size))
        else:
            later = np.searchsorted(self.pointer[:-1], begin + self.chunk_size)
        is_first = (before < 0) | (starts(np.maximum(before, 0)) < begin)
        return np.where(is_first, rows, later)

    @property
    def n_elements(self) -> int:
        """Number of elements in all rows."""
        if self.pointer is None:
            return self.n_rows * self.row_size
        return int(self.pointer[-1])


# How far an epoch has come, on a given number of ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an epoch has come, and how it was divided.

    Parameters
    ----------
    world_size
        Number of ranks, or of streams; see `EpochPlan`.
    n_minibatches
        Number of minibatches that each has delivered.

    Raises
    ------
    ParameterError
        ``world_size`` is below one, or ``n_minibatches`` is negative.
    """

    world_size: int = 1
    n_minibatches: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        object.__setattr__(self, "world_size", require_positive("world_size", self.world_size))
        n = require_integer("n_minibatches", self.n_minibatches)
        object.__setattr__(self, "n_minibatches", n)
        if n < 0:
            msg = f"`n_minibatches >= 0` must hold, but got {n}"
            raise ParameterError(msg)
