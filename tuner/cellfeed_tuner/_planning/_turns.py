"""Measurements in turns: how fast configurations are beside each other."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import CONFIDENCE, Estimate
from cellfeed_tuner._results._recommended import Rival

__all__ = ["LEAST_TURNS", "Turns", "TurnsOf"]

LEAST_TURNS = 4
"""Turns without which nothing is said to be decided."""

Setting = TypeVar("Setting")

# Of turns of the configuration that has most: with fewer, one has left the race.
_FINALIST_SHARE = 0.5


@dataclass(slots=True)
class TurnsOf(Generic[Setting]):
    """Throughputs that were measured in turns.

    In each turn, a few settings are measured one right after the other, in random order, so
    that what else the machine does meets them alike. The logarithm of a throughput is taken to be
    that of the setting, plus what the moment does to the whole turn, plus an error: a
    two-way analysis of variance, fitted by least squares, since not every setting is in
    every turn.
    """

    _turns: list[dict[Setting, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._turns)

    def note(self, cells_per_second: Mapping[Setting, float]) -> None:
        """Take note of the throughputs of one turn."""
        self._turns.append(dict(cells_per_second))

    def count(self, setting: Setting) -> int:
        """Return in how many turns a setting was."""
        return sum(setting in turn for turn in self._turns)

    def count_together(self, one: Setting, other: Setting) -> int:
        """Return in how many turns both were."""
        return sum(one in turn and other in turn for turn in self._turns)

    def finalists(self) -> list[Setting]:
        """Return what was in at least half as many turns as anything, the fastest first."""
        counts = Counter(each for turn in self._turns for each in turn)
        if not counts:
            return []
        fit = self._fit()
        least = _FINALIST_SHARE * max(counts.values())
        kept = [each for each, count in counts.items() if count >= least]
        return sorted(kept, key=lambda each: -fit.effects[fit.place[each]])

    def ratio(self, one: Setting, other: Setting) -> Estimate | None:
        """Return how many times as fast one is as the other, with its 95 % interval.

        None if they were in no two turns together.
        """
        if self.count_together(one, other) <= 1:
            return None
        fit = self._fit()
        contrast = np.zeros(fit.effects.size)
        contrast[fit.place[one]], contrast[fit.place[other]] = 1.0, -1.0
        difference = float(contrast @ fit.effects)
        error = float(np.sqrt(contrast @ fit.covariance @ contrast))
        half = float(student_t.ppf((1 + CONFIDENCE) / 2, fit.freedom)) * error
        return Estimate(exp(difference), exp(difference - half), exp(difference + half))

    def _fit(self) -> "_Fit[Setting]":
        measured = dict.fromkeys(each for turn in self._turns for each in turn)
        place = {each: number for number, each in enumerate(measured)}
        rows = [
            (number, place[each], log(speed))
            for number, turn in enumerate(self._turns)
            for each, speed in turn.items()
        ]
        n, n_effects = len(rows), len(place)
        design = np.zeros((n, n_effects + len(self._turns)))
        for row, (turn, column, _) in enumerate(rows):
            design[row, column] = design[row, n_effects + turn] = 1.0
        logs = np.array([each for *_, each in rows])
        inverse = np.asarray(np.linalg.pinv(design.T @ design), dtype=np.float64)
        fitted = np.asarray(inverse @ design.T @ logs, dtype=np.float64)
        residuals = logs - design @ fitted
        freedom = n - int(np.linalg.matrix_rank(design))
        variance = float(residuals @ residuals) / freedom if freedom else 0.0
        covariance = variance * inverse[:n_effects, :n_effects]
        return _Fit(place, fitted[:n_effects], covariance, freedom)


@dataclass(slots=True)
class Turns(TurnsOf[Configuration]):
    """Throughputs of configurations."""

    def rival(self, configuration: Configuration, other: Configuration) -> Rival | None:
        """Return how a configuration compares with another; None if too little is known."""
        ratio = self.ratio(configuration, other)
        if ratio is None:
            return None
        n_turns = self.count_together(configuration, other)
        return Rival(configuration=other, ratio=ratio, n_turns=n_turns)


@dataclass(frozen=True, slots=True)
class _Fit(Generic[Setting]):
    """Effects of settings, up to a constant that all have in common."""

    place: Mapping[Setting, int]
    effects: NDArray[np.float64]
    covariance: NDArray[np.float64]
    freedom: int
