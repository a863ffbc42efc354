"""Systematic sampling: a fixed number of draws, each cell in proportion to its weight."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed.sampling._masses import Masses
from cellfeed.sampling._random import derive_key, random_below, random_words

__all__ = ["SystematicDraws"]

# Purposes of the random streams of one epoch.
_START, _OFFSET = range(2)

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystematicDraws:
    """Draws in storage order, by their numbers.

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
    block_size
        Number of draws that should be neighbours in storage.
    key
        Key from which, with the number of the round, all randomness is computed.
    """

    masses: Masses
    n: int
    block_size: int
    key: int

    def cells(self, rounds: Integers, draws: Integers) -> Integers:
        """Return the drawn cells.

        Parameters
        ----------
        rounds
            Numbers of rounds, shape (n,); each has its own random start.
        draws
            Numbers of draws in their rounds, values in [0, n), shape (n,).
        """
        points = _Points.of(self, rounds)
        natural = points.at(draws)
        stretch_size = min(self.block_size, self.n) * points.step
        stretches = self.masses.locate(natural).starts // stretch_size
        distinct, place = np.unique(stretches, return_inverse=True)
        # Stretches begin with the first cell that begins in them.
        starts = self._cuts(distinct * stretch_size)[place]
        ends = self._cuts((distinct + 1) * stretch_size)[place]
        spacing = self.masses.largest(starts, ends)
        sizes = ends - starts
        is_moved = spacing <= sizes // -(-sizes // points.step)
        words = random_words(derive_key(self.key, _OFFSET, 0), rounds)
        words = random_words(derive_key(self.key, _OFFSET, 1), words + stretches.astype(np.uint64))
        offsets = (words >> np.uint64(11)) * 2.0**-53 * sizes
        offset = np.minimum(offsets.astype(np.int64), sizes - 1)
        numbers = draws - points.first_from(starts)
        spacing = np.where(is_moved, spacing, 0)
        moved = starts + (offset + numbers * spacing) % sizes
        return self.masses.locate(np.where(is_moved, moved, natural)).cells

    def numbers_from(self, starts: Integers) -> Integers:
        """Return how many points of the first round are before each place on the line."""
        return _Points.of(self, np.zeros_like(starts)).first_from(starts)

    def _cuts(self, points: Integers) -> Integers:
        """Return, for each point, the start of the first cell that does not begin before it."""
        ends = self.masses.locate(np.clip(points, 1, self.masses.total) - 1).ends
        return np.where(points > 0, ends, 0)


@dataclass(frozen=True, slots=True)
class _Points:
    """Equidistant points on a circle, numbered from its beginning, in each of several rounds.

    Parameters
    ----------
    step
        Distance between neighbouring points.
    extra
        Additional length of one distance, since the circle is not a multiple of the step.
    firsts
        The first point of each round, less ``extra`` if the longer distance comes before it.
    at_extra
        Number of the point in each round that follows the longer distance.
    """

    step: int
    extra: int
    firsts: Integers
    at_extra: Integers

    @classmethod
    def of(cls, draws: SystematicDraws, rounds: Integers) -> "_Points":
        total, n = draws.masses.total, draws.n
        step, extra = divmod(total, n)
        distinct, place = np.unique(rounds, return_inverse=True)
        firsts, at_extra = np.empty_like(distinct), np.empty_like(distinct)
        for number, each in enumerate(distinct.tolist()):
            start = random_below(derive_key(draws.key, _START, each), total)
            n_from_start = min(n, -(-(total - start) // step))
            firsts[number] = start + n_from_start * step - total
            at_extra[number] = n - n_from_start
        return cls(step, extra, firsts[place], at_extra[place])

    def at(self, numbers: Integers) -> Integers:
        """Return the points with the given numbers, one per round."""
        return self.firsts + numbers * self.step + self.extra * (numbers >= self.at_extra)

    def first_from(self, starts: Integers) -> Integers:
        """Return the number of the first point that is not before each start."""
        before = -((self.firsts - starts) // self.step)
        behind = -((self.firsts + self.extra - starts) // self.step)
        return np.where(before < self.at_extra, before, np.maximum(behind, self.at_extra))
