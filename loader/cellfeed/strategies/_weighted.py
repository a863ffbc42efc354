"""Cells drawn in proportion to weights, in blocks."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.extending import ParameterError, require_positive
from cellfeed.sampling import (
    ABSENT_BY_DEFAULT,
    BlockShuffling,
    EpochOrder,
    SamplingStrategy,
    derive_key,
    label_codes,
    n_available,
    random_below,
    random_words,
    sorted_indices,
)
from cellfeed.strategies._cells import LabelledCells, of_cells, require_length, sorted_with

Integers = NDArray[np.int64]
Floats = NDArray[np.floating]

# Weights as integers, whose sums are exact in any order.
#
# Weights become *masses*: integers in proportion to them, whose total is just below 2^62. The cells
# are intervals on a line, each as long as its mass, and a draw looks up the cell at a point.
# Floats could not do that for 10^9 cells: they have 53 bits, and their sums depend on the order
# of additions, which differs between processors.

_N_BITS = 62  # of the total: sums of two masses fit into int64
_GROUP = 128  # cells; the largest mass of each group is stored


def masses_of(weights: Floats, n_bits: int = _N_BITS) -> Integers:
    """Return masses in proportion to weights, at least one of which is above 0.

    They are the weights times a power of two, rounded up, so none above 0 becomes 0. Their total
    has ``n_bits`` bits.
    """
    n = weights.size
    exponent = n_bits - n.bit_length() - math.frexp(float(weights.max()))[1]
    # Most cells may weigh less than the largest: that many more bits, and rounding up fits, too.
    exponent += n_bits - (int(_rounded_up(weights, exponent).sum()) + n).bit_length()
    return _rounded_up(weights, exponent)


def _rounded_up(weights: Floats, exponent: int) -> Integers:
    masses = np.ldexp(weights, exponent)
    np.ceil(masses, out=masses)
    np.maximum(masses, weights > 0, out=masses)  # what has underflowed
    return masses.astype(np.int64)


def capped_masses(weights: Floats, n_draws: int) -> Integers:
    """Return masses of which none is above the total / ``n_draws``, so none is drawn twice.

    Cells that are above it are certain to be drawn. They are set apart, round by round, and the
    remaining draws are divided among the others (Särndal, Swensson and Wretman, "Model assisted
    survey sampling", 1992, section 3.6). In the end, their masses are the distance of draws.

    Parameters
    ----------
    weights
        Weights, at least ``n_draws`` of them above 0.
    n_draws
        Number of cells that are drawn, none of them twice.
    """
    is_certain = np.zeros(weights.size, bool)
    while True:
        n_left = n_draws - int(np.count_nonzero(is_certain))
        # Together with those set apart, the total has as many bits as usual.
        n_bits = _N_BITS - (n_draws // n_left).bit_length()
        masses = masses_of(np.where(is_certain, 0, weights), n_bits)
        step = int(masses.sum()) // n_left
        is_above = masses > step
        if not is_above.any():
            break
        is_certain |= is_above
    masses[is_certain] = step
    return masses


class EvenMasses:
    """Cells of equal weight as consecutive intervals on a line, which need no memory.

    Parameters
    ----------
    n
        Number of cells.

    Attributes
    ----------
    total
        Length of the line, above 0.
    """

    def __init__(self, n: int) -> None:
        self._each = 1 << (_N_BITS - n.bit_length())
        self.total = n * self._each

    def at(self, points: Integers) -> Integers:
        """Return the cells at points in [-1, total); -1 at -1."""
        return points // self._each

    def starts(self, cells: Integers) -> Integers:
        """Return where cells begin, and the total for their number."""
        return cells * self._each

    def largest(self, first: Integers, _end: Integers) -> Integers:
        """Return the largest mass of each range of cells."""
        return np.full(first.shape, self._each)


class CellMasses:
    """Cells as consecutive intervals on a line, each as long as its mass; 8 bytes a cell.

    Parameters
    ----------
    masses
        The mass of each cell.

    Attributes
    ----------
    total
        Length of the line, above 0.
    """

    def __init__(self, masses: Integers) -> None:
        self._bounds = np.concatenate([[0], np.cumsum(masses)])
        self.total = int(self._bounds[-1])
        largest = np.maximum.reduceat(masses, np.arange(0, masses.size, _GROUP))
        self._largest = np.append(largest, 0)  # for ranges to the end

    def at(self, points: Integers) -> Integers:
        """Return the cells at points in [-1, total); -1 at -1."""
        return np.searchsorted(self._bounds, points, side="right") - 1

    def starts(self, cells: Integers) -> Integers:
        """Return where cells begin, and the total for their number."""
        return self._bounds[cells]

    def largest(self, first: Integers, end: Integers) -> Integers:
        """Return the largest mass of each range of cells, or of its groups of 128 cells."""
        ranges = np.stack([first // _GROUP, -(-end // _GROUP)], axis=1).ravel()
        largest: Integers = np.maximum.reduceat(self._largest, ranges)[::2]
        return largest


Masses = EvenMasses | CellMasses

# Systematic sampling: a fixed number of draws, each cell in proportion to its weight.

# Purposes of the random streams of the draws.
_START, _OFFSET = range(2)


def systematic_draws(
    masses: Masses, n: int, rounds: Integers, draws: Integers, key: int, block_size: int
) -> Integers:
    """Return drawn cells, which are in storage order in each round.

    Cells are consecutive intervals on a line, each as long as its weight, and equidistant points
    from a random start choose the drawn cells (Madow, "On the theory of systematic sampling, II",
    Annals of Mathematical Statistics 20, 1949). On average over starts, a cell is drawn in exact
    proportion to its weight; in each epoch, that number is rounded up or down.

    If the weights are small, these points are far apart. The line is therefore cut between cells
    into stretches of ``block_size`` draws, and the points of a stretch move together: as close as
    possible without drawing its heaviest cell twice, and shifted by an offset that is uniform
    on the stretch as a circle, so the properties above are preserved. Consecutive draws are then
    neighbours in storage if the cells of a stretch have equal weights. If weights differ so
    much that this could draw a cell twice, the points stay where they are.

    Parameters
    ----------
    masses
        The cells and their weights.
    n
        Number of draws in a round.
    rounds
        Numbers of rounds, shape (n_cells,); each has its own random start.
    draws
        Numbers of draws in their rounds, values in [0, n), shape (n_cells,).
    key
        Key from which, with the number of the round, all randomness is computed.
    block_size
        Number of draws that should be neighbours in storage.
    """
    step, extra = divmod(masses.total, n)
    distinct, place = np.unique(rounds, return_inverse=True)
    keys = [derive_key(key, _START, each) for each in distinct.tolist()]
    starts = np.array([random_below(each, masses.total) for each in keys], np.int64)[place]
    # From the start, which a longer distance precedes.
    numbers = draws - np.maximum(0, (starts - extra) // step)
    points = starts + numbers * step - extra * (numbers < 0)
    size = min(block_size, n) * step
    # A stretch has the cells that begin in it.
    stretches = masses.starts(masses.at(points)) // size
    distinct, place = np.unique(stretches, return_inverse=True)
    first, end = (
        masses.at(np.minimum(each * size, masses.total) - 1) + 1
        for each in (distinct, distinct + 1)
    )
    starts, ends = masses.starts(first), masses.starts(end)
    sizes, spacing = ends - starts, masses.largest(first, end)
    is_moved = (spacing <= sizes // -(-sizes // step))[place]
    starts, sizes, spacing = starts[place], sizes[place], spacing[place]
    words = random_words(derive_key(key, _OFFSET, 0), rounds)
    words = random_words(derive_key(key, _OFFSET, 1), words + stretches.astype(np.uint64))
    offsets = (words >> np.uint64(11)) * 2.0**-53 * sizes
    moved = np.minimum(offsets.astype(np.int64), sizes - 1)
    moved += np.where(is_moved, (points - starts) // step * spacing, 0)
    return masses.at(np.where(is_moved, starts + moved % sizes, points))


def systematic_counts(bounds: Integers, n: int, key: int) -> Integers:
    """Return how often each interval is drawn in round 0, by points that stay where they are.

    Parameters
    ----------
    bounds
        Where consecutive intervals of a line begin, and the end of the last, shape (n_counts + 1,).
    n, key
        See `systematic_draws`.
    """
    total = int(bounds[-1])
    step, extra = divmod(total, n)
    start = random_below(derive_key(key, _START, 0), total)
    after, before = (-((each - bounds) // step) for each in (start, start - extra))
    return np.diff(np.clip(after, 0, n) + np.minimum(before, 0))


# Purposes of the random streams of one epoch.
_BLOCKS, _ROUNDS, _LAST_ROUND = range(3)
_MOST_DRAWS = 1 << 40  # so that weights have 20 bits each


class WeightedBlocks(SamplingStrategy):
    """Base class of strategies that draw cells by weight.

    In ``__post_init__``, subclasses call `_check_sizes`, and then sum the weights in `_masses`.
    """

    block_size: int
    indices: ArrayLike | None
    total_size: int | None
    replace: bool
    sampling_size: int | None

    @abstractmethod
    def _weights_of_cells(self) -> Floats | None:
        """Return the weight of each cell; None for equal weights."""

    @abstractmethod
    def _require_length(self, n_rows: int) -> None:
        """Check that the number of weights fits a collection of ``n_rows`` rows."""

    @property
    def shuffles_fetch(self) -> bool:
        """Always true: blocks are mixed in memory."""
        return True

    def n_positions(self, n_rows: int) -> int:
        """Return the number of cells that an epoch draws."""
        n = n_available(self.indices, n_rows)
        self._require_length(n_rows)
        self._require_enough(n)
        return self.total_size or n

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Return the draws of one epoch, without memory that grows with rows."""
        n_draws = self.n_positions(n_rows)
        masses = self._masses or EvenMasses(n_available(self.indices, n_rows))
        size = min(self.sampling_size or n_draws, n_draws)
        n_whole, n_of_last = divmod(n_draws, size)
        blocks = BlockShuffling(self.block_size).epoch_order(
            n_rows=n_draws, epoch_key=derive_key(epoch_key, _BLOCKS)
        )
        indices = None if self.indices is None else np.asarray(self.indices)

        def rows_at(positions: NDArray[np.int64], /) -> NDArray[np.int64]:
            rounds, draws = np.divmod(blocks(positions.ravel()), size)
            cells = np.empty_like(draws)
            for n, purpose, of_it in (
                (size, _ROUNDS, rounds < n_whole),
                (n_of_last, _LAST_ROUND, rounds == n_whole),
            ):
                if of_it.any():
                    key = derive_key(epoch_key, purpose)
                    cells[of_it] = systematic_draws(
                        masses, n, rounds[of_it], draws[of_it], key, self.block_size
                    )
            found: NDArray[np.int64] = cells if indices is None else indices[cells]
            return found.reshape(positions.shape)

        return rows_at

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters, from which other processes sum the weights again."""
        return {name: value for name, value in vars(self).items() if name != "_masses"}

    @cached_property
    def _masses(self) -> CellMasses | None:
        """The cells of a round by weight; None for equal weights."""
        weights = self._weights_of_cells()
        if weights is None:
            return None
        n_drawable = int(np.count_nonzero(weights))
        if not n_drawable:
            msg = (
                f"`weights` leave nothing to draw, since none of {weights.size:,} cells has a "
                "weight above 0; give some"
            )
            raise ParameterError(msg)
        self._require_enough(n_drawable)
        n = self.total_size or weights.size
        n = min(self.sampling_size or n, n)
        return CellMasses(masses_of(weights) if self.replace else capped_masses(weights, n))

    def _check_sizes(self) -> None:
        object.__setattr__(self, "block_size", require_positive("block_size", self.block_size))
        for name in ("total_size", "sampling_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_positive(name, getattr(self, name)))
        if (self.total_size or 0) > _MOST_DRAWS:
            msg = f"`total_size <= {_MOST_DRAWS}` must hold, but got {self.total_size}"
            raise ParameterError(msg)
        if not self.replace and self.total_size is None and self.sampling_size is None:
            msg = (
                "replace=False needs `total_size` or `sampling_size`: each cell is drawn at most "
                "once, so weights have no effect if all cells are drawn"
            )
            raise ParameterError(msg)

    def _require_enough(self, n: int) -> None:
        """Check that there are enough cells to draw none of them twice in a round."""
        sizes = {"total_size": self.total_size, "sampling_size": self.sampling_size}
        size, name = min((size or math.inf, name) for name, size in sizes.items())
        if not self.replace and size > n:
            msg = (
                f"`{name} <= {n}` (cells with a weight above 0) must hold without replacement, "
                f"but got {name}={size}"
            )
            raise ParameterError(msg)


@dataclass(frozen=True, eq=False)
class BlockWeightedSampling(WeightedBlocks):
    """Draw cells in proportion to weights, in contiguous blocks, and shuffle within each fetch.

    Draws are systematic (Madow 1949): on average over epochs, a cell is drawn exactly
    ``total_size * weight / sum(weights)`` times, and in each epoch that number, rounded up or down.
    Draws that follow each other in storage form a block, and blocks come in random order. If
    neighbours have equal weights, the cells of a block are contiguous: in a region with one draw
    per ten cells, for example, each block is a run of ``block_size`` cells, at a random place among
    ten times as many rows.

    Without replacement, a cell is drawn with a probability in proportion to its weight, but at
    most 1: cells whose weight would require more are always drawn, and the remaining draws are
    divided among the others (Särndal, Swensson and Wretman, "Model assisted survey sampling", 1992,
    section 3.6).

    Parameters
    ----------
    block_size
        Number of draws in a block.
    indices
        The rows to draw from, one-dimensional integers; all rows if None. A row that is given
        twice counts twice. They are sorted, with a warning if they were not.
    weights
        Weight of each row of the collection, or of each of ``indices`` if there are as many:
        finite, not negative, at least one above 0. They need not sum to 1. Equal weights if None.
    total_size
        Number of draws in an epoch; by default, the number of rows to draw from.
    replace
        Whether a cell may be drawn more than once in an epoch. If false, give ``total_size``, so
        that no cell comes twice among these draws (or not more often than ``indices`` have it), or
        ``sampling_size``.
    sampling_size
        An epoch consists of rounds of ``sampling_size`` draws. Without replacement, no cell comes
        twice in a round. The last round may be shorter: all cells are then less likely, in the same
        proportions. One round if None.

    Raises
    ------
    ParameterError
        A size is below one, weights cannot be used, or too few are above 0 to draw none twice.

    Notes
    -----
    Weights take 8 bytes a row (4 if they are float32), and their cumulative sum another 8, for the
    rows to draw from; each process computes it once, unless it is forked. The sum is of integers,
    and so exact: weights are rounded to 2^-60 of it.

    Examples
    --------
    >>> strategy = BlockWeightedSampling(block_size=1, weights=[0, 1, 1, 2], total_size=8)
    >>> drawn = strategy.epoch_order(n_rows=4, epoch_key=0)(np.arange(8))
    >>> np.bincount(drawn)
    array([0, 2, 2, 4])
    """

    block_size: int = 8
    indices: ArrayLike | None = None
    weights: ArrayLike | None = None
    total_size: int | None = None
    replace: bool = True
    sampling_size: int | None = None

    def __post_init__(self) -> None:
        """Check the parameters; sum the weights."""
        self._check_sizes()
        if self.weights is not None:
            weights = sorted_with(self.indices, checked_weights(self.weights))
            object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "indices", sorted_indices(self.indices))
        _ = self._masses

    def _weights_of_cells(self) -> Floats | None:
        if self.weights is None:
            return None
        return of_cells(np.asarray(self.weights), self.indices, "weights")

    def _require_length(self, n_rows: int) -> None:
        if self.weights is not None:
            require_length("weights", np.size(self.weights), self.indices, n_rows)


def checked_weights(weights: ArrayLike) -> Floats:
    """Return weights as a read-only copy, float64, or float32 if they are float32.

    A copy that this function made before is returned itself.

    Raises
    ------
    ParameterError
        They are not one-dimensional numbers, finite and not negative.
    """
    if isinstance(weights, np.ma.MaskedArray) and np.ma.is_masked(weights):
        raise ParameterError("`weights` are masked; give `weights.filled(0)`")
    given = np.asarray(weights)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "biuf":
        msg = (
            "`weights` must be one-dimensional numbers, one for each cell, but got "
            f"shape {given.shape} and dtype {given.dtype}"
        )
        raise ParameterError(msg)
    dtype = np.float32 if given.dtype == np.float32 else np.float64
    is_ours = given.dtype == dtype and given.base is None and not given.flags.writeable
    values: Floats = given if is_ours else given.astype(dtype)
    values.flags.writeable = False
    if not (values.min() >= 0 and values.max() < np.inf):  # also false for NaN
        first = int(np.argmin((values >= 0) & (values < np.inf)))
        msg = f"`weights` must be finite and not negative, but weights[{first}] is {values[first]}"
        raise ParameterError(msg)
    return values


# Cells drawn so that all classes are equally frequent.


@dataclass(frozen=True, eq=False)
class ClassBalancedSampling(LabelledCells, WeightedBlocks):
    """Draw cells so that every class is equally frequent, or more nearly so, in contiguous blocks.

    This is `BlockWeightedSampling` with the weight ``n ** -power`` for each cell of a class of n
    cells; see there for how cells are drawn. On average over epochs, the draws of a class are in
    proportion to ``n ** (1 - power)``: with ``power=1``, all classes are equally frequent; with 0,
    they are as frequent as their cells; with 0.5, one of 10,000 cells is drawn ten times as often
    as one of 100.

    Parameters
    ----------
    labels
        The class of each cell: numbers, text or categories. Cells without a class (NaN, None, or
        the number -1, whatever the dtype) are never drawn; other negative numbers are classes.
        Give one label for each row of the collection, or for each of ``indices`` if there are as
        many; or the name of an obs column of the collection; or a tuple of several names, so that
        each combination of values is a class (a list is one of labels). Classes are counted among
        ``indices``.
    block_size
        Number of draws in a block.
    indices
        The rows to draw from; all rows if None. A row that is given twice counts twice. They are
        sorted, with a warning if they were not.
    total_size, replace, sampling_size
        See `BlockWeightedSampling`. Without replacement, all cells of a small class are drawn,
        and the remaining draws are divided among the other classes.
    power
        How far classes are balanced: from 0, not at all, to 1.

    Raises
    ------
    ParameterError
        A size is below one, labels cannot be used, or there are too few cells with labels to draw
        none twice.

    Notes
    -----
    Labels take the memory of their codes, 1 byte a row if there are few classes, and the cumulative
    sum of weights another 8, for the rows to draw from.

    Examples
    --------
    >>> strategy = ClassBalancedSampling(["B", "B", "B", "NK", None], total_size=6, block_size=1)
    >>> np.bincount(strategy.epoch_order(n_rows=5, epoch_key=0)(np.arange(6)))
    array([1, 1, 1, 3])

    ``ClassBalancedSampling(("organism", "cell_type"), power=0.5)`` draws each combination of two
    obs columns in proportion to the square root of its number of cells.
    """

    labels: ArrayLike | str | tuple[str, ...]
    block_size: int = 8
    indices: ArrayLike | None = None
    total_size: int | None = None
    replace: bool = True
    sampling_size: int | None = None
    power: float = field(default=1.0, metadata=ABSENT_BY_DEFAULT)

    def __post_init__(self) -> None:
        """Check the parameters; count the classes."""
        self._check_sizes()
        if not 0 <= self.power <= 1:
            msg = f"`0 <= power <= 1` must hold, but got power={self.power}"
            raise ParameterError(msg)
        # A state leaves out the default, which is that object.
        power = type(self).power if self.power == 1 else float(self.power)
        object.__setattr__(self, "power", power)
        if not self.column_names:
            labels = sorted_with(self.indices, label_codes(self.labels))
            object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "indices", sorted_indices(self.indices))
        _ = self._masses

    def _weights_of_cells(self) -> Floats | None:
        if self.column_names:
            return None
        codes = self.codes_of_cells()
        counts = np.append(np.bincount(codes[codes >= 0]), 0)  # the last one is of no class
        weights = np.where(counts > 0, np.maximum(counts, 1) ** -self.power, 0)
        of_cell: Floats = weights[codes]
        return of_cell

    def _require_length(self, n_rows: int) -> None:
        require_length("labels", self.codes.size, self.indices, n_rows)
