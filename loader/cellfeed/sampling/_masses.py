"""Weights as integers, whose sums are exact in any order.

Weights become *masses*: integers in proportion to them, whose total is just below 2^62. The cells
are intervals on a line, each as long as its mass, and a draw looks up the cell at a point.
Floats could not do that for 10^9 cells: they have 53 bits, and their sums depend on the order
of additions, which differs between processors.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_N_BITS = 62  # of the total: sums of two masses fit into int64
_LEAST_CAP = 1 << 20  # a largest mass below is too coarse for the others
_CHUNK = 128  # cells; only their total is stored
_CHUNKS_AT_ONCE = 64  # in which cells are located together; in the CPU's cache
_CELLS_AT_ONCE = 1 << 16  # whose masses are computed together; in the CPU's cache

Integers = NDArray[np.int64]


class Located(NamedTuple):
    """The cells at given points of the line, and where these cells begin and end."""

    cells: Integers
    starts: Integers
    ends: Integers


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
    def total(self) -> int:
        """Length of the line, above 0."""
        return self.n * self._each

    @property
    def _each(self) -> int:
        return 1 << (_N_BITS - self.n.bit_length())

    def locate(self, points: Integers) -> Located:
        """Return the cells at given points, and where these cells begin and end."""
        cells = points // self._each
        starts = cells * self._each
        return Located(cells, starts, starts + self._each)

    def largest(self, starts: Integers, ends: Integers) -> Integers:
        """Return the largest mass in each of the given parts of the line."""
        del ends
        return np.full(starts.shape, self._each)


@dataclass(frozen=True, slots=True, eq=False)
class CellWeights:
    """The given weights of cells.

    Parameters
    ----------
    values
        Weights, finite and not negative, of any float dtype: one per cell; or one per class,
        followed by a 0 for cells without a class.
    codes
        The class of each cell, -1 without a class; None if ``values`` are the weights of cells.
    indices
        Positions of the cells in ``codes`` or ``values``; all positions in order if None.
    """

    values: NDArray[np.floating]
    codes: NDArray[np.signedinteger] | None = None
    indices: Integers | None = None

    @property
    def n(self) -> int:
        """Number of cells."""
        if self.indices is not None:
            return self.indices.size
        return self.values.size if self.codes is None else self.codes.size

    def at(self, cells: slice | Integers) -> NDArray[np.float64]:
        """Return the weights of the given cells."""
        at: slice | NDArray[np.signedinteger] = cells
        if self.indices is not None:
            at = self.indices[at]
        if self.codes is not None:
            at = self.codes[at]
        return self.values[at].astype(np.float64, copy=False)

    def largest(self) -> float:
        """Return the largest weight."""
        return max(float(self.at(part).max()) for part in self.parts())

    def smallest(self) -> float:
        """Return the smallest weight that is above 0."""
        each = (self.at(part) for part in self.parts())
        return min(float(weights.min(where=weights > 0, initial=np.inf)) for weights in each)

    def n_positive(self) -> int:
        """Return how many cells have a weight above 0."""
        return sum(int(np.count_nonzero(self.at(part))) for part in self.parts())

    def parts(self) -> list[slice]:
        """Return all cells in parts that are processed one at a time."""
        starts = range(0, self.n, _CELLS_AT_ONCE)
        return [slice(start, min(start + _CELLS_AT_ONCE, self.n)) for start in starts]


@dataclass(frozen=True, slots=True, eq=False)
class _Rounded:
    """Weights as integers: ``min(weight / unit, 1) * 2^bits``, rounded up, and at most ``cap``.

    Rounding up gives every weight above 0 a positive mass.
    """

    weights: CellWeights
    unit: float
    bits: int
    cap: int

    def at(self, cells: slice | Integers) -> Integers:
        """Return the masses of the given cells."""
        shares = np.minimum(self.weights.at(cells), self.unit)
        shares /= self.unit
        shares *= 2.0**self.bits
        masses = np.ceil(shares, out=shares).astype(np.int64)
        return np.minimum(masses, self.cap, out=masses)

    def total(self) -> int:
        """Return the sum over all cells."""
        return sum(int(self.at(part).sum()) for part in self.weights.parts())

    def below(self, cap: int) -> tuple[int, int]:
        """Return the sum of masses below ``cap``, and the number of cells with other masses."""
        total = n_capped = 0
        for part in self.weights.parts():
            masses = self.at(part)
            n_here = int(np.count_nonzero(masses >= cap))
            total += int(np.minimum(masses, cap, out=masses).sum()) - n_here * cap
            n_capped += n_here
        return total, n_capped


def _rounded(weights: CellWeights, unit: float) -> _Rounded:
    """Return weights up to ``unit`` as integers, as large as the total allows."""
    bits = _N_BITS - weights.n.bit_length()
    rounded = _Rounded(weights, unit, bits, cap=1 << bits)
    # Most cells may weigh less than the largest: that many more bits, and rounding up fits, too.
    more = _N_BITS - (rounded.total() + weights.n).bit_length()
    return replace(rounded, bits=bits + more, cap=1 << (bits + more))


def masses_of(weights: CellWeights) -> "CellMasses":
    """Return masses in proportion to weights, at least one of which is above 0."""
    return CellMasses(_rounded(weights, weights.largest()))


def capped_masses(weights: CellWeights, n_draws: int) -> "CellMasses":
    """Return masses in proportion to weights, capped at the total / ``n_draws``.

    The cap is the largest c with ``sum(min(mass, c)) >= n_draws c``. It is found from above: each
    step divides the mass of the cells that are not capped by the number of draws left for them
    (Särndal, Swensson and Wretman, "Model assisted survey sampling", 1992, section 3.6).

    Parameters
    ----------
    weights
        The weights, at least ``n_draws`` of them above 0.
    n_draws
        Number of cells that are drawn, none of them twice.
    """
    unit = weights.largest()
    while True:
        rounded = _rounded(weights, unit)
        cap = rounded.cap
        while True:
            total, n_capped = rounded.below(cap)
            if total + n_capped * cap >= n_draws * cap:
                break
            cap = total // (n_draws - n_capped)
        if cap >= min(_LEAST_CAP, rounded.cap):
            return CellMasses(replace(rounded, cap=cap))
        # What weighs more is drawn always, so that all bits are left to what weighs less.
        unit = max(weights.smallest(), cap * 2.0**-rounded.bits * unit)


@dataclass(frozen=True, eq=False)
class CellMasses:
    """Cells as consecutive intervals on a line, each as long as its mass.

    Only sums over 128 cells are stored: n / 8 bytes for n cells.

    Parameters
    ----------
    rounded
        The masses.
    """

    rounded: _Rounded
    _starts: Integers = field(init=False, repr=False)
    _largest: Integers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Sum the masses."""
        n_chunks = -(-self.rounded.weights.n // _CHUNK)
        starts, largest = np.zeros(n_chunks + 1, np.int64), np.zeros(n_chunks + 1, np.int64)
        for part in self.rounded.weights.parts():
            masses = self.rounded.at(part)
            first = part.start // _CHUNK
            heads = np.arange(0, masses.size, _CHUNK)
            chunks = slice(first, first + heads.size)
            starts[1:][chunks] = np.add.reduceat(masses, heads)
            largest[chunks] = np.maximum.reduceat(masses, heads)
        object.__setattr__(self, "_starts", np.cumsum(starts))
        object.__setattr__(self, "_largest", largest)

    @property
    def total(self) -> int:
        """Length of the line, above 0."""
        return int(self._starts[-1])

    def bounds(self) -> Integers:
        """Return where each cell begins, and the end of the last, shape (n + 1,)."""
        masses = [self.rounded.at(part) for part in self.rounded.weights.parts()]
        return np.cumsum(np.concatenate([[0], *masses]))

    def locate(self, points: Integers) -> Located:
        """Return the cells at given points, and where these cells begin and end."""
        located = Located(*(np.empty(points.size, np.int64) for _ in Located._fields))
        order = np.argsort(points)
        chunks, firsts = np.unique(self._chunks_at(points[order]), return_index=True)
        bounds = [*firsts[::_CHUNKS_AT_ONCE].tolist(), points.size]
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            some = chunks[number * _CHUNKS_AT_ONCE :][:_CHUNKS_AT_ONCE]
            at = order[first:last]
            for values, found in zip(located, self._locate_in(some, points[at]), strict=True):
                values[at] = found
        return located

    def _locate_in(self, chunks: Integers, points: Integers) -> Located:
        n = self.rounded.weights.n
        cells = chunks[:, None] * _CHUNK + np.arange(_CHUNK)
        masses = np.where(cells < n, self.rounded.at(np.minimum(cells, n - 1)), 0)
        ends = (self._starts[chunks][:, None] + np.cumsum(masses, axis=1)).ravel()
        at = np.searchsorted(ends, points, side="right")  # they ascend over all chunks
        return Located(cells.ravel()[at], ends[at] - masses.ravel()[at], ends[at])

    def largest(self, starts: Integers, ends: Integers) -> Integers:
        """Return the largest mass in each part of the line, or in its groups of 128 cells."""
        first, last = self._chunks_at(starts), self._chunks_at(ends - 1)
        if np.array_equal(first, last):
            return self._largest[first]
        bounds = np.stack([first, last + 1], axis=1).ravel()
        largest: Integers = np.maximum.reduceat(self._largest, bounds)[::2]
        return largest

    def _chunks_at(self, points: Integers) -> NDArray[np.intp]:
        return np.searchsorted(self._starts, points, side="right") - 1


Masses = EvenMasses | CellMasses
