"""Weights as integers, whose sums are exact in any order.

Weights become *masses*: integers in proportion to them, whose total is just below 2^62. The cells
are intervals on a line, each as long as its mass, and a draw looks up the cell at a point.
Floats could not do that for 10^9 cells: they have 53 bits, and their sums depend on the order
of additions, which differs between processors.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_N_BITS = 62  # of the total: sums of two masses fit into int64
_GROUP = 128  # cells; the largest mass of each group is stored

Integers = NDArray[np.int64]
Floats = NDArray[np.floating]


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
    half = exponent // 2  # twice, since 2^exponent may be beyond floats
    masses = weights * 2.0**half
    masses *= 2.0 ** (exponent - half)
    np.ceil(masses, out=masses)
    np.maximum(masses, weights > 0, out=masses)  # what has underflowed
    integers: Integers = masses.astype(np.int64)
    return integers


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


@dataclass(frozen=True, slots=True)
class EvenMasses:
    """Cells of equal weight as consecutive intervals on a line, which need no memory.

    Parameters
    ----------
    n
        Number of cells.
    """

    n: int

    @property
    def each(self) -> int:
        """The mass of a cell."""
        return 1 << (_N_BITS - self.n.bit_length())

    @property
    def total(self) -> int:
        """Length of the line, above 0."""
        return self.n * self.each

    def at(self, points: Integers) -> Integers:
        """Return the cells at points in [0, total)."""
        return points // self.each

    def starts(self, cells: Integers) -> Integers:
        """Return where cells begin, and the total for ``n``."""
        return cells * self.each

    def largest(self, first: Integers, end: Integers) -> Integers:
        """Return the largest mass of each range of cells."""
        del end
        return np.full(first.shape, self.each)


class CellMasses:
    """Cells as consecutive intervals on a line, each as long as its mass; 8 bytes a cell.

    Parameters
    ----------
    masses
        The mass of each cell.
    """

    def __init__(self, masses: Integers) -> None:
        self.bounds = np.concatenate([[0], np.cumsum(masses)])
        largest = np.maximum.reduceat(masses, np.arange(0, masses.size, _GROUP))
        self._largest = np.append(largest, 0)  # for ranges to the end

    @property
    def total(self) -> int:
        """Length of the line, above 0."""
        return int(self.bounds[-1])

    def at(self, points: Integers) -> Integers:
        """Return the cells at points in [0, total)."""
        return np.searchsorted(self.bounds, points, side="right") - 1

    def starts(self, cells: Integers) -> Integers:
        """Return where cells begin, and the total for ``n``."""
        return self.bounds[cells]

    def largest(self, first: Integers, end: Integers) -> Integers:
        """Return the largest mass of each range of cells, or of its groups of 128 cells."""
        ranges = np.stack([first // _GROUP, -(-end // _GROUP)], axis=1).ravel()
        largest: Integers = np.maximum.reduceat(self._largest, ranges)[::2]
        return largest


Masses = EvenMasses | CellMasses
