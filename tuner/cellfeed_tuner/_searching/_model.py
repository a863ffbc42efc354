"""What measurements say of every configuration: one Gaussian process over the settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from math import exp, log, log1p, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.linalg.lapack import dpotrf, dtrtrs
from scipy.spatial.distance import cdist
from scipy.special import ndtr

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import USUAL_FREEDOM, Estimate, positive_estimate

# What counts as clearly faster than another; what was not timed is recommended if it is expected
# to be so. Chosen: nobody would set up a training again for less.
CLEARLY_FASTER = 0.05
# Draws for the probability that any of many is faster, and the most promising configurations for
# which they are drawn. Chosen: a probability of 5 % is then known to 1 %.
N_DRAWS, MOST_DRAWN = 512, 128
# Standard deviation of the logarithm of the time unit, about which nothing is known; and of what
# other settings than the sizes and the workers change.
ANY_SCALE, BY_OTHERS = 3.0, 0.3
# How much less a cell costs with each doubling of the block size, and of the fetch factor, before
# anything is timed. Chosen: less than from 64 to 256 in any recorded grid; smaller sizes cost more.
BY_DOUBLING = 0.05
# A doubling of workers changes as much as this part of one of a size.
WORKER_DOUBLING = 0.5
# The parameters are fitted again when there are so many times as many replicates.
FIT_AGAIN = 1.1
# Values of a parameter that a fit tries, in standard deviations of the prior from its median, and
# how often it tries each parameter.
TRIED, PASSES = np.arange(-3.0, 3.1, 0.5), 2
# Added to variances, so that matrices are invertible.
JITTER = 1e-9

_Floats = NDArray[np.float64]


class Parameters(NamedTuple):
    """Standard deviations of the logarithm of seconds per cell, and a distance.

    Attributes
    ----------
    noise
        Of a replicate.
    sizes
        What block size, fetch factor and workers change.
    reach
        Doublings of them over which that fades.
    own
        What is peculiar to a configuration.
    turn
        What replicates of one turn have in common.
    """

    noise: float
    sizes: float
    reach: float
    own: float
    turn: float


_Covariances = Callable[[Parameters], _Floats]
"""Covariances of configurations, or their Cholesky root, by the parameters."""

# Medians of the parameters, and the factors that are a standard deviation. Chosen: wide, and fitted
# to no recorded grid.
TYPICAL = Parameters(noise=0.07, sizes=0.6, reach=3.0, own=0.08, turn=0.03)
FACTORS = Parameters(noise=1.8, sizes=2.0, reach=1.6, own=3.0, turn=2.5)


class Replicate(NamedTuple):
    """Seconds per cell in one replicate, and the turn in which it was measured."""

    seconds_per_cell: float
    turn: int


class Model:
    """The costs of configurations, as far as replicates tell.

    The logarithm of seconds per cell is the sum of a trend (`BY_DOUBLING`), a smooth function of
    block size, fetch factor and workers (in doublings), something peculiar to each configuration,
    something that all replicates of a turn share, and noise: a Gaussian process. Its parameters are
    the likeliest, given the replicates and the prior (`TYPICAL`); they say how much a replicate
    tells of its neighbours, and nothing where there is no structure. Rasmussen and Williams,
    Gaussian Processes for Machine Learning (2006), chapters 2 and 5.

    Parameters
    ----------
    configurations, candidates
        Those that can run, and those of them that may be chosen by entropy and memory.
    need
        Cells per second that suffice; None if the fastest is the best.
    worth
        How good a configuration is that has the needed throughput.
    seed
        Seed of the draws.
    """

    def __init__(
        self,
        configurations: Iterable[Configuration],
        candidates: Iterable[Configuration],
        *,
        need: float | None = None,
        worth: Callable[[Configuration], float] = lambda _: 0.0,
        seed: int = 0,
    ) -> None:
        self._need, self._worth, self._seed = need, worth, seed
        self._place = {each: place for place, each in enumerate(configurations)}
        # Doublings of sizes and workers, and a number for other settings, by place.
        self._points, self._groups = np.empty((0, 3)), np.empty(0, np.intp)
        self._candidates = dict.fromkeys(candidates)
        self._replicates: dict[Configuration, Sequence[Replicate]] = {}
        self._parameters, self._n_fitted = TYPICAL, 0
        # Derived from the replicates, until there are more.
        self._is_current, self._prospects = False, dict[Configuration, tuple[float, float]]()

    @property
    def candidates(self) -> list[Configuration]:
        """Configurations that may still be chosen."""
        return list(self._candidates)

    def tell(self, configuration: Configuration, replicates: Sequence[Replicate]) -> None:
        """Update the replicates of a configuration; without any, it has failed."""
        self._place.setdefault(configuration, len(self._place))
        self._is_current, self._prospects = False, {}
        if replicates:
            self._replicates[configuration] = replicates
        else:
            self.withdraw(configuration)

    def withdraw(self, configuration: Configuration) -> None:
        """Leave out a configuration that has failed, or is not feasible after all."""
        self._candidates.pop(configuration, None)
        self._prospects = {}

    def add(self, candidates: Iterable[Configuration]) -> None:
        """Add new candidates."""
        for each in candidates:
            if each not in self._place:
                self._place[each] = len(self._place)
                self._candidates[each] = None
                self._is_current, self._prospects = False, {}

    def seconds_per_cell(self) -> Mapping[Configuration, float]:
        """Return the median cost of each configuration; empty before any measurement."""
        if not self._replicates:
            return {}
        self._update()
        return self._costs

    def speed(self, configuration: Configuration) -> Estimate | None:
        """Return cells per second, with their 95 % interval; None before any measurement.

        The interval covers what the machine does from turn to turn. If it drifts, it ends twice as
        far from its mean, as a variance, as it is on average.
        """
        if not self._replicates or configuration not in self._place:
            return None
        (mean,), ((variance,),) = self._posterior([configuration])
        error = sqrt(max(0.0, variance) + 2 * self._parameters.turn**2)
        return positive_estimate(exp(-mean), error, self._freedom)

    def ratio(self, one: Configuration, other: Configuration) -> Estimate | None:
        """Return one throughput divided by another, with its 95 % interval.

        None before any measurement.
        """
        if not self._replicates or not {one, other} <= self._place.keys():
            return None
        mean, covariance = self._posterior([one, other])
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        return positive_estimate(exp(mean[1] - mean[0]), sqrt(max(0.0, variance)), self._freedom)

    @property
    def leader(self) -> Configuration | None:
        """The candidate that is expected to be the best; None before any measurement."""
        if not self._replicates or not self._candidates:
            return None
        return self.candidates[int(np.argmax(self._expected()[0]))]

    def prospects(self) -> dict[Configuration, tuple[float, float]]:
        """Return how each other candidate compares with the leader.

        The probability that it is better, and the expected improvement.
        """
        if self._prospects or (leader := self.leader) is None:
            return self._prospects
        values, enough = self._expected()
        at, candidates = self.candidates.index(leader), self.candidates
        places = np.array([self._place[each] for each in candidates])
        ahead = self._mean[places[at]] - self._mean[places]
        covariances = self._covariance(places, places[[at]])[:, 0]
        error = self._variance[places] + self._variance[places[at]] - 2 * covariances
        error = np.sqrt(np.maximum(error, JITTER))
        chances = ndtr(ahead / error)
        gains = ahead * chances + error * _density(ahead / error)
        if self._need is not None:  # speed counts only where neither is fast enough
            worth = np.array([self._worth(each) for each in candidates])
            neither = (1 - enough) * (1 - enough[at])
            better = np.where(worth > worth[at], enough, enough * (1 - enough[at]))
            chances = better + neither * chances
            gains = enough * np.maximum(0.0, worth - values[at]) + neither * gains
        found = zip(candidates, zip(chances.tolist(), gains.tolist(), strict=True), strict=True)
        self._prospects = {each: prospect for each, prospect in found if each != leader}
        return self._prospects

    def chance_of_faster(self, configuration: Configuration) -> float:
        """Return the probability that any candidate that was not timed is clearly faster."""
        others = [each for each in self._candidates if each not in self._replicates]
        if not others or not self._replicates or configuration not in self._place:
            return 0.0
        costs = self.seconds_per_cell()
        others = sorted(others, key=costs.__getitem__)[:MOST_DRAWN]
        rng = np.random.default_rng(self._seed)
        logs = rng.multivariate_normal(*self._posterior([configuration, *others]), N_DRAWS)
        return float((logs[:, :1] - logs[:, 1:] > log1p(CLEARLY_FASTER)).any(axis=1).mean())

    def _expected(self) -> tuple[_Floats, _Floats]:
        """Return the expected value of each candidate, and the probability that it is fast enough.

        Without a need, the value is the logarithm of cells per second. With one, it is the worth
        of what has it; what has not is worse than that, and worse the slower it is.
        """
        self._update()
        places = [self._place[each] for each in self._candidates]
        speed = -self._mean[places]
        if self._need is None:
            return speed, np.ones(speed.size)
        error = np.sqrt(np.maximum(self._variance[places], JITTER))
        lead = speed - log(self._need)
        enough = ndtr(lead / error)
        worth = np.array([self._worth(each) for each in self._candidates])
        lacking = lead * (1 - enough) - error * _density(lead / error)
        return worth * enough + lacking, enough

    @property
    def _freedom(self) -> float:
        """Degrees of freedom of the spread of replicates; its prior has some."""
        return USUAL_FREEDOM + sum(len(each) - 1 for each in self._replicates.values())

    def _posterior(self, configurations: Sequence[Configuration]) -> tuple[_Floats, _Floats]:
        """Return mean and covariance of the logarithms of seconds per cell."""
        self._update()
        places = np.array([self._place[each] for each in configurations])
        return self._mean[places], self._covariance(places, places)

    def _covariance(self, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> _Floats:
        known: _Floats = self._known[:, rows].T @ self._known[:, columns]
        return self._prior(rows, columns)(self._parameters) - known

    def _update(self) -> None:
        """Solve for all configurations, with new parameters if there are enough new replicates."""
        if self._is_current:
            return
        self._is_current = True
        if len(self._points) < len(self._place):
            sizes = [(e.block_size, e.fetch_factor, 1 + e.num_workers) for e in self._place]
            self._points = np.log2(np.array(sizes, np.float64)) * (1.0, 1.0, WORKER_DOUBLING)
            others = [tuple(each.others.items()) for each in self._place]
            number = {each: place for place, each in enumerate(dict.fromkeys(others))}
            self._groups = np.array([number[each] for each in others])
        trend = -BY_DOUBLING * self._points[:, :2].sum(axis=1)
        found = [(self._place[each], *one) for each, own in self._replicates.items() for one in own]
        rows, seconds, turns = (np.array(each) for each in zip(*found, strict=True))
        logs = np.log(seconds) - trend[rows]
        level = logs.mean()
        root_at = self._root(rows, turns)
        if logs.size >= FIT_AGAIN * self._n_fitted:
            self._n_fitted = logs.size
            self._parameters = _likeliest(root_at, logs - level)
        root = root_at(self._parameters)
        weights = solve_triangular(root, logs - level, lower=True)
        prior = self._prior(rows, np.arange(len(self._place)))(self._parameters)
        self._known: _Floats = solve_triangular(root, prior, lower=True)
        self._mean: _Floats = trend + level + self._known.T @ weights
        self._costs = dict(zip(self._place, np.exp(self._mean).tolist(), strict=True))
        own = self._parameters.sizes**2 + self._parameters.own**2 + BY_OTHERS**2 + ANY_SCALE**2
        self._variance: _Floats = np.maximum(0.0, own - (self._known**2).sum(axis=0))

    def _prior(self, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> _Covariances:
        """Return covariances before anything is timed, with Matern's correlation (3/2).

        What depends on no parameter is computed once, and the correlation once for each reach.
        """
        distances = cdist(self._points[rows], self._points[columns]) * sqrt(3.0)
        is_same = np.equal.outer(rows, columns).astype(np.float64)
        common = BY_OTHERS**2 * np.equal.outer(self._groups[rows], self._groups[columns])
        common += ANY_SCALE**2

        @lru_cache(maxsize=1)
        def correlation(reach: float) -> _Floats:
            scaled = distances / reach
            found: _Floats = (1 + scaled) * np.exp(-scaled)
            return found

        def covariance(parameters: Parameters) -> _Floats:
            found = parameters.sizes**2 * correlation(parameters.reach) + common
            found += parameters.own**2 * is_same
            return found

        return covariance

    def _root(self, rows: NDArray[np.intp], turns: NDArray[np.intp]) -> _Covariances:
        """Return the lower Cholesky root of the covariances of replicates."""
        prior, is_same_turn = self._prior(rows, rows), np.equal.outer(turns, turns) * 1.0
        diagonal = np.diag_indices(rows.size)

        def root(parameters: Parameters) -> _Floats:
            found = prior(parameters)
            found += parameters.turn**2 * is_same_turn
            found[diagonal] += parameters.noise**2 + JITTER
            # Never singular, since every replicate has noise of its own.
            factor: _Floats = dpotrf(found, lower=1)[0]
            return factor

        return root


def _likeliest(root_at: _Covariances, logs: _Floats) -> Parameters:
    """Return the likeliest parameters, given the replicates and the prior, one by one."""

    def parameters(steps: tuple[float, ...]) -> Parameters:
        return Parameters(*(np.array(TYPICAL) * np.array(FACTORS) ** steps).tolist())

    @cache
    def loss(steps: tuple[float, ...]) -> float:
        root = root_at(parameters(steps))
        seen = dtrtrs(root, logs, lower=1)[0]
        prior = sum(each**2 for each in steps)
        return float(np.log(np.diag(root)).sum() + (seen @ seen + prior) / 2)

    found = (0.0,) * len(Parameters._fields)
    for place in PASSES * tuple(range(len(found))):
        found = min(
            ((*found[:place], each, *found[place + 1 :]) for each in TRIED.tolist()), key=loss
        )
    return parameters(found)


def _density(z: _Floats) -> _Floats:
    """Return the density of the standard normal distribution."""
    density: _Floats = np.exp(-(z**2) / 2) / sqrt(2 * np.pi)
    return density
