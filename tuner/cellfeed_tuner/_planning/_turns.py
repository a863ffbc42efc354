"""Interleaved measurements, in turns: how fast configurations are relative to each other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from cellfeed_tuner._interval import CONFIDENCE, Estimate
from cellfeed_tuner._planning._constants import (
    FINALIST_SHARE,
    NEXT_TO_NOTHING,
    NOTHING,
    TURN_ODDS,
    TURN_VARIANCES,
)

__all__ = ["Effects", "TurnsOf", "effects"]

Setting = TypeVar("Setting")


@dataclass(slots=True)
class TurnsOf(Generic[Setting]):
    """Throughputs that were measured in turns.

    In each turn, a few settings are measured one right after the other, in random order, so that
    the load of the machine affects them alike. The logarithm of a throughput is modelled as an
    effect of the setting, a random effect of the turn, and an independent error. The variance of
    turns is estimated by restricted maximum likelihood; if it is small, settings of different
    turns compare as well as those of one.
    """

    _turns: list[dict[Setting, float]] = field(default_factory=list)
    # The fit, until there are more turns.
    _fitted: "_Fit[Setting] | None" = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self._turns)

    def note(self, cells_per_second: Mapping[Setting, float]) -> None:
        """Add the throughputs of one turn."""
        if cells_per_second:
            self._turns.append(dict(cells_per_second))
            self._fitted = None

    def forget(self, setting: Setting) -> None:
        """Remove a setting from all turns."""
        self._turns = [
            {each: speed for each, speed in turn.items() if each != setting} for turn in self._turns
        ]
        self._fitted = None

    def count(self, setting: Setting) -> int:
        """Return in how many turns a setting was."""
        return sum(setting in turn for turn in self._turns)

    def count_together(self, one: Setting, other: Setting) -> int:
        """Return in how many turns both were."""
        return sum(one in turn and other in turn for turn in self._turns)

    def finalists(self) -> list[Setting]:
        """Return settings that were in at least half as many turns as any, the fastest first."""
        counts = Counter(each for turn in self._turns for each in turn)
        if not counts:
            return []
        fit = self._fit()
        least = FINALIST_SHARE * max(counts.values())
        kept = [each for each, count in counts.items() if count >= least]
        return sorted(kept, key=lambda each: -fit.effects[fit.place[each]])

    def ratio(self, one: Setting, other: Setting) -> Estimate | None:
        """Return the ratio of two throughputs, with its 95 % interval.

        None if they were in no two turns together.
        """
        if self.count_together(one, other) <= 1:
            return None
        fit = self._fit()
        contrast = np.zeros(fit.effects.size)
        contrast[fit.place[one]], contrast[fit.place[other]] = 1.0, -1.0
        difference = float(contrast @ fit.effects)
        error = float(np.sqrt(contrast @ fit.covariance @ contrast))
        half = float(stdtrit(fit.freedom, (1 + CONFIDENCE) / 2)) * error
        return Estimate(exp(difference), exp(difference - half), exp(difference + half))

    def _fit(self) -> "_Fit[Setting]":
        if self._fitted is None:
            self._fitted = self._newly_fitted()
        return self._fitted

    def _newly_fitted(self) -> "_Fit[Setting]":
        measured = dict.fromkeys(each for turn in self._turns for each in turn)
        place = {each: number for number, each in enumerate(measured)}
        rows = [
            (number, place[each], log(speed))
            for number, turn in enumerate(self._turns)
            for each, speed in turn.items()
        ]
        design = _design(rows, len(place))
        likeliest = _likeliest(*design)
        if likeliest.turn_variance == TURN_VARIANCES[-1]:
            # The level of a turn says nothing about settings.
            likeliest = _least_squares(*design, inf)
        return _Fit(place, likeliest.effects, likeliest.covariance, likeliest.freedom)


class Effects(NamedTuple):
    """Means of settings that are free of the turns in which they were measured.

    ``covariance`` is theirs if errors, of replicates and their turns together, have variance 1.
    """

    means: NDArray[np.float64]
    covariance: NDArray[np.float64]


def effects(replicates: Sequence[Sequence[tuple[int, float]]]) -> Effects:
    """Return the means of settings, each with its replicates: the turn of each, and its value.

    Examples
    --------
    >>> means, covariance = effects([[(0, 1.0), (1, 3.0)], [(0, 2.0)]])
    >>> means.tolist(), covariance.diagonal().tolist()
    ([2.0, 2.0], [0.5, 1.0])
    """
    turns = dict.fromkeys(turn for found in replicates for turn, _ in found)
    place = {turn: number for number, turn in enumerate(turns)}
    rows = [
        (place[turn], column, value)
        for column, found in enumerate(replicates)
        for turn, value in found
    ]
    fit = _likeliest(*_design(rows, len(replicates)))
    return Effects(fit.effects, fit.inverse / (1 + fit.turn_variance))


def _design(
    rows: Sequence[tuple[int, int, float]], n_settings: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return indicators of settings and of turns, and values, of (turn, setting, value)."""
    n_turns = 1 + max(turn for turn, *_ in rows)
    settings, turns = (np.zeros((len(rows), n)) for n in (n_settings, n_turns))
    for row, (turn, column, _) in enumerate(rows):
        settings[row, column] = turns[row, turn] = 1.0
    return settings, turns, np.array([value for *_, value in rows])


@dataclass(frozen=True, slots=True)
class _Fit(Generic[Setting]):
    """Effects of settings, up to a common constant."""

    place: Mapping[Setting, int]
    effects: NDArray[np.float64]
    covariance: NDArray[np.float64]
    freedom: float


class _LeastSquares(NamedTuple):
    effects: NDArray[np.float64]
    covariance: NDArray[np.float64]
    freedom: float
    log_likelihood: float
    turn_variance: float
    inverse: NDArray[np.float64]


def _likeliest(
    settings: NDArray[np.float64], turns: NDArray[np.float64], logs: NDArray[np.float64]
) -> _LeastSquares:
    """Return the fit whose variance of turns is the likeliest; a small one is so beforehand."""
    fits = [_least_squares(settings, turns, logs, share) for share in TURN_VARIANCES]
    place = max(range(len(fits)), key=lambda each: fits[each].log_likelihood - TURN_ODDS * each)
    return fits[place]


def _least_squares(
    settings: NDArray[np.float64],
    turns: NDArray[np.float64],
    logs: NDArray[np.float64],
    turn_variance: float,
) -> _LeastSquares:
    """Fit effects of settings, given the variance of turns relative to that of errors.

    The likelihood is restricted: that of the residuals.
    """
    n, n_settings = settings.shape
    n_looks = turns.sum(axis=0)
    shrunk = 1 / (n_looks + (1 / turn_variance if turn_variance else inf))
    apart = np.eye(n) - (turns * shrunk) @ turns.T  # inverse of I + variance T T'
    information = settings.T @ apart @ settings
    # With infinite variance of turns, the common level of settings is not identified.
    inverse = np.linalg.pinv(information, rcond=NEXT_TO_NOTHING, hermitian=True)
    effects: NDArray[np.float64] = inverse @ settings.T @ apart @ logs
    left = logs - settings @ effects
    squares, freedom = float(left @ apart @ left), n - n_settings
    if freedom <= 0 or squares <= NOTHING:
        nothing = np.zeros_like(inverse)
        return _LeastSquares(effects, nothing, max(1.0, freedom), inf, turn_variance, inverse)
    log_likelihood = -inf
    if turn_variance < inf:
        _, log_of_information = np.linalg.slogdet(information)
        log_of_errors = -float(np.log1p(turn_variance * n_looks).sum())
        log_likelihood = (log_of_errors - log_of_information - freedom * log(squares)) / 2
    # Effects of turns cost degrees of freedom, as far as they matter.
    paid = float(shrunk @ n_looks) * (1 - 1 / n_looks.size)
    freedom_left = max(1.0, freedom - min(paid, len(turns.T) - 1))
    covariance = squares / freedom * inverse
    return _LeastSquares(effects, covariance, freedom_left, log_likelihood, turn_variance, inverse)
