"""Systematic sampling: as many draws as are asked for, each cell in proportion to its weight."""

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
    """Draws in the order of storage, by their numbers.

    Cells lie side by side on a line, each as long as its weight, and points at equal distances,
    from a random start, say which are drawn (Madow, "On the theory of systematic sampling, II",
    Annals of Mathematical Statistics 20, 1949). A cell is drawn in exact proportion to its weight
    on average over starts, and as often in each epoch as that says, rounded up or down.

    Where cells weigh little, such points lie far apart. The line is therefore cut between cells
    into stretches of ``block_size`` draws, and the points of a stretch move together: as close as
    the heaviest of its cells allows without being drawn twice, and by an offset that is uniform
    on the stretch as a circle, so that all that is said above remains. Draws that follow each
    other are then neighbours in storage where cells of one stretch weigh the same. Where they
    differ so much that this could draw a cell twice, points stay where they are.

    Parameters
    ----------
    masses
        The cells and their weights.
    n
        Draws of a round.
    block_size
        Draws that are to be neighbours in storage.
    key
        What is random follows from it and the number of the round.
    """

    masses: Masses
    n: int
    block_size: int
    key: int

    def cells(self, rounds: Integers, draws: Integers) -> Integers:
        """Return the cells that are drawn.

        Parameters
        ----------
        rounds
            Numbers of rounds, shape (n,); each has a start of its own.
        draws
            Which of a round's draws, values in [0, n), shape (n,).
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
        """Return how many points of the first round lie before each place on the line."""
        return _Points.of(self, np.zeros_like(starts)).first_from(starts)

    def _cuts(self, points: Integers) -> Integers:
        """Return where the first cell begins that does not begin before each point."""
        ends = self.masses.locate(np.clip(points, 1, self.masses.total) - 1).ends
        return np.where(points > 0, ends, 0)


@dataclass(frozen=True, slots=True)
class _Points:
    """Points at equal distances on a circle, numbered from its beginning, in some rounds.

    Parameters
    ----------
    step
        Distance between two.
    extra
        By how much one distance is larger, since the circle is no multiple of the step.
    firsts
        The first point of each round; less than 0 by ``extra`` if that comes before it.
    at_extra
        Number of the point in each round before which ``extra`` comes.
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
        """Return the points with these numbers, one of each round."""
        return self.firsts + numbers * self.step + self.extra * (numbers >= self.at_extra)

    def first_from(self, starts: Integers) -> Integers:
        """Return the number of the first point that is not before each start."""
        before = -((self.firsts - starts) // self.step)
        behind = -((self.firsts + self.extra - starts) // self.step)
        return np.where(before < self.at_extra, before, np.maximum(behind, self.at_extra))
