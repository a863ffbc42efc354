"""What measurements say of every configuration: one Gaussian process over the settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log1p, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import minimize

from cellfeed_tuner._choose import Goal
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import USUAL_FREEDOM, Estimate, positive_estimate

# Draws of all costs for computing probabilities, and the most promising configurations for which
# they are drawn. Chosen: a probability of 5 % is then known to 1 %.
N_DRAWS, MOST_DRAWN = 512, 128
# What counts as clearly faster than another; what was not timed is recommended if it is expected
# to be so. Chosen: nobody would set up a training again for less.
CLEARLY_FASTER = 0.05
# Standard deviation of the logarithm of the time unit, about which nothing is known; and of what
# other settings than the sizes and the workers change. Chosen.
ANY_SCALE, BY_OTHERS = 3.0, 0.3
# How much less a cell costs with each doubling of the block size, and of the fetch factor, before
# anything is timed. Chosen: less than from 64 to 256 in any recorded grid; smaller sizes cost more.
BY_DOUBLING = 0.05
# Doublings of workers that change as much as one of a size. Chosen.
WORKER_DOUBLING = 2.0
# The parameters are fitted again when there are so many times as many replicates. Chosen.
FIT_AGAIN = 1.1
# Steps of a fit, and how far it may go, in standard deviations of the prior. Chosen.
MOST_STEPS, FARTHEST = 12, 4.0
# Added to variances, so that matrices are invertible.
JITTER = 1e-9

_Floats = NDArray[np.float64]
_Places = NDArray[np.int64]


class Parameters(NamedTuple):
    """Standard deviations of the logarithm of seconds per cell, and a distance.

    Attributes
    ----------
    sizes
        What block size and fetch factor change.
    reach
        Doublings of them over which that fades.
    workers
        What workers change, differently for different sizes.
    own
        What is peculiar to a configuration.
    noise
        Of a replicate.
    turn
        What replicates of one turn have in common.
    """

    sizes: float
    reach: float
    workers: float
    own: float
    noise: float
    turn: float


# Medians of the parameters, and the factors that are a standard deviation. Chosen: wide, and fitted
# to no recorded grid.
TYPICAL = Parameters(sizes=0.6, reach=3.0, workers=0.2, own=0.08, noise=0.07, turn=0.03)
FACTORS = Parameters(sizes=2.0, reach=1.6, workers=1.8, own=3.0, noise=1.8, turn=2.5)
# Where a second fit begins: configurations have nothing in common.
UNRELATED = Parameters(sizes=0.1, reach=3.0, workers=0.1, own=0.4, noise=0.1, turn=0.03)


class Replicate(NamedTuple):
    """Seconds per cell in one replicate, and the turn in which it was measured."""

    seconds_per_cell: float
    turn: int


@dataclass(frozen=True, slots=True, eq=False)
class _Features:
    """Settings as numbers, each of shape (n,): logarithms of sizes, and the group of all others."""

    block: _Floats
    fetch: _Floats
    workers: _Floats
    others: _Places

    @property
    def expected(self) -> _Floats:
        """Logarithms of costs before anything is timed, up to a constant."""
        return -BY_DOUBLING * (self.block + self.fetch)

    @classmethod
    def of(cls, configurations: Sequence[Configuration]) -> "_Features":
        groups: dict[tuple[object, ...], int] = {}
        for each in configurations:
            groups.setdefault(tuple(each.others.items()), len(groups))
        sizes = np.log2(
            [(each.block_size, each.fetch_factor, 1 + each.num_workers) for each in configurations]
        ).reshape(-1, 3)
        others = np.array(
            [groups[tuple(each.others.items())] for each in configurations], dtype=np.int64
        )
        block, fetch, workers = sizes.T
        return cls(block, fetch, workers, others)

    def apart(self, rows: _Places, columns: _Places) -> tuple[_Floats, _Floats, NDArray[np.bool_]]:
        """Return distances of sizes and of workers in doublings, and whether the rest is equal."""

        def between(values: NDArray[np.generic]) -> _Floats:
            difference: _Floats = np.subtract.outer(values[rows], values[columns])
            return difference

        sizes = np.hypot(between(self.block), between(self.fetch))
        return sizes, WORKER_DOUBLING * np.abs(between(self.workers)), between(self.others) == 0


class _Solved(NamedTuple):
    """The replicates' configurations, their mean, and the root and weights that predict others."""

    rows: _Places
    level: float
    root: _Floats
    weights: _Floats


def _fading(distance: _Floats, reach: float) -> tuple[_Floats, _Floats]:
    """Return Matern's correlation (3/2), and its slope in the logarithm of the reach."""
    scaled = np.sqrt(3.0) * distance / reach
    fading = np.exp(-scaled)
    return (1 + scaled) * fading, scaled**2 * fading


class Model:
    """The costs of configurations, as far as replicates tell.

    The logarithm of seconds per cell is the sum of a trend (`BY_DOUBLING`), a smooth function of
    block size and fetch factor (in doublings), another one of these and the workers, something
    peculiar to each configuration, something that all replicates of a turn share, and noise: a
    Gaussian process. Its parameters are the likeliest, given the replicates and the prior
    (`TYPICAL`); they say how much a replicate tells of its neighbours, and nothing where there is
    no structure. Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), chapters 2
    and 5.

    Parameters
    ----------
    configurations, candidates
        Those that can run, and those of them that may be chosen by entropy and memory.
    goal_of
        Returns the goal for a list of configurations.
    seed
        Seed of the draws.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        candidates: Iterable[Configuration],
        *,
        goal_of: Callable[[Sequence[Configuration]], Goal],
        seed: int = 0,
    ) -> None:
        self._goal_of, self._seed = goal_of, seed
        self._replicates: dict[Configuration, tuple[Replicate, ...]] = {}
        self._candidates = dict.fromkeys(candidates)
        self._parameters, self._n_fitted = TYPICAL, 0
        # Derived from the replicates, until there are more.
        self._values: _Floats | None = None
        self._solved: _Solved | None = None
        self._costs: dict[Configuration, float] = {}
        self._set(configurations)

    @property
    def candidates(self) -> list[Configuration]:
        """Configurations that may still be chosen."""
        return list(self._candidates)

    def tell(self, configuration: Configuration, replicates: Sequence[Replicate]) -> None:
        """Update the replicates of a configuration; without any, it has failed."""
        if configuration not in self._place:
            self._set([*self._place, configuration])
        if not replicates:
            self.withdraw(configuration)
            return
        self._replicates[configuration] = tuple(replicates)
        self._forget()

    def withdraw(self, configuration: Configuration) -> None:
        """Leave out a configuration that has failed, or is not feasible after all."""
        self._candidates.pop(configuration, None)
        self._values = None

    def add(self, candidates: Iterable[Configuration]) -> None:
        """Add new candidates."""
        new = [each for each in candidates if each not in self._place]
        if new:
            self._candidates |= dict.fromkeys(new)
            self._set([*self._place, *new])

    def update_goal(self) -> None:
        """Update the goal, since more is known about entropies."""
        self._goal = self._goal_of(list(self._place))
        self._forget()

    def seconds_per_cell(self) -> Mapping[Configuration, float]:
        """Return the median cost of each configuration; empty before any measurement."""
        if not self._costs and self._replicates:
            mean, _ = self._known()
            self._costs = dict(zip(self._place, np.exp(mean).tolist(), strict=True))
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
        variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
        return positive_estimate(exp(mean[1] - mean[0]), sqrt(max(0.0, variance)), self._freedom)

    @property
    def leader(self) -> Configuration | None:
        """The candidate that is expected to be the best; None before any measurement."""
        if not self._replicates:
            return None
        mean = self._drawn().mean(axis=0)
        return max(self._candidates, key=lambda each: mean[self._place[each]], default=None)

    def prospects(self) -> dict[Configuration, tuple[float, float]]:
        """Return how each other candidate compares with the leader.

        The probability that it is better, and the expected improvement (0 where it is worse).
        """
        leader = self.leader
        if leader is None:
            return {}
        values = self._drawn()
        leads = values - values[:, [self._place[leader]]]
        chances, gains = (leads > 0).mean(axis=0), np.maximum(leads, 0.0).mean(axis=0)
        others = {each: self._place[each] for each in self._candidates if each != leader}
        return {each: (float(chances[at]), float(gains[at])) for each, at in others.items()}

    def chance_of_faster(self, configuration: Configuration) -> float:
        """Return the probability that any candidate that was not timed is clearly faster."""
        others = [each for each in self._candidates if each not in self._replicates]
        if not others or not self._replicates or configuration not in self._place:
            return 0.0
        logs = self._draws([configuration, *others])
        return float((logs[:, :1] - logs[:, 1:] > log1p(CLEARLY_FASTER)).any(axis=1).mean())

    @property
    def _freedom(self) -> float:
        """Degrees of freedom of the spread of replicates; its prior has some."""
        return USUAL_FREEDOM + sum(len(each) - 1 for each in self._replicates.values())

    def _set(self, configurations: Sequence[Configuration]) -> None:
        self._place = {each: place for place, each in enumerate(configurations)}
        self._features = _Features.of(configurations)
        self._goal = self._goal_of(configurations)
        self._forget()

    def _forget(self) -> None:
        self._values, self._solved, self._costs = None, None, {}

    def _drawn(self) -> _Floats:
        """Return draws of the values to maximize, shape (n_draws, n_configurations).

        Unpromising configurations have their mean in all draws.
        """
        if self._values is None:
            mean, variance = self._known()
            promising = self._goal(-mean + 2 * np.sqrt(variance))
            names = list(self._place)
            drawn = np.argsort(-promising, kind="stable")[:MOST_DRAWN]
            logs = np.tile(mean, (N_DRAWS, 1))
            logs[:, drawn] = self._draws([names[place] for place in drawn.tolist()])
            self._values = self._goal(-logs)
        return self._values

    def _draws(self, configurations: Sequence[Configuration]) -> _Floats:
        """Return draws of the logarithms of costs, shape (n_draws, n)."""
        mean, covariance = self._posterior(configurations)
        n_replicates = sum(map(len, self._replicates.values()))
        rng = np.random.default_rng((self._seed, n_replicates))
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        drawn: _Floats = mean + rng.standard_normal((N_DRAWS, mean.size)) @ root.T
        return drawn

    def _known(self) -> tuple[_Floats, _Floats]:
        """Return mean and variance of each configuration's logarithm of seconds per cell."""
        every = np.arange(len(self._place))
        mean, root = self._given(every)
        sizes, _, workers, own, *_ = self._parameters
        prior = sizes**2 + workers**2 + own**2 + BY_OTHERS**2 + ANY_SCALE**2
        return mean, np.maximum(0.0, prior - (root**2).sum(axis=0))

    def _posterior(self, configurations: Sequence[Configuration]) -> tuple[_Floats, _Floats]:
        """Return mean and covariance of the logarithms of seconds per cell."""
        places = np.array([self._place[each] for each in configurations], dtype=np.int64)
        mean, root = self._given(places)
        return mean, self._covariance(places, places) - root.T @ root

    def _given(self, places: _Places) -> tuple[_Floats, _Floats]:
        """Return means, and the part of the covariance that is known, as its root."""
        if self._solved is None:
            self._solved = self._solve()
        rows, level, root, weights = self._solved
        known: _Floats = solve_triangular(root, self._covariance(rows, places), lower=True)
        return self._features.expected[places] + level + known.T @ weights, known

    def _solve(self) -> "_Solved":
        """Fit the parameters if there are enough new replicates, and solve for all of them."""
        rows, turns, logs = self._rows()
        logs = logs - self._features.expected[rows]
        if logs.size >= FIT_AGAIN * self._n_fitted:
            self._parameters, self._n_fitted = self._fit(rows, turns, logs), logs.size
        noise, turn = self._parameters.noise, self._parameters.turn
        seen = self._covariance(rows, rows) + turn**2 * np.equal.outer(turns, turns)
        seen += (noise**2 + JITTER) * np.eye(logs.size)
        root, level = cholesky(seen, lower=True), float(logs.mean())
        return _Solved(rows, level, root, solve_triangular(root, logs - level, lower=True))

    def _rows(self) -> tuple[_Places, _Places, _Floats]:
        """Return the configuration, the turn and the logarithm of the cost of each replicate."""
        found = [
            (self._place[each], one.turn, one.seconds_per_cell)
            for each, own in self._replicates.items()
            for one in own
        ]
        rows, turns, seconds = zip(*found, strict=True)
        return np.array(rows, np.int64), np.array(turns, np.int64), np.log(seconds)

    def _covariance(self, rows: _Places, columns: _Places) -> _Floats:
        sizes, workers, alike = self._features.apart(rows, columns)
        by_size, by_workers = (
            _fading(each, self._parameters.reach)[0] for each in (sizes, workers)
        )
        found: _Floats = self._parameters.sizes**2 * by_size
        found += self._parameters.workers**2 * by_size * by_workers
        found += self._parameters.own**2 * np.equal.outer(rows, columns)
        return found + BY_OTHERS**2 * alike + ANY_SCALE**2

    def _fit(self, rows: _Places, turns: _Places, logs: _Floats) -> Parameters:
        """Return the likeliest parameters, given the replicates and the prior."""
        sizes, workers, alike = self._features.apart(rows, rows)
        eye, same = np.eye(logs.size), np.equal.outer(rows, rows)
        together = np.equal.outer(turns, turns)
        seen, typical, factors = logs - logs.mean(), np.log(TYPICAL), np.log(FACTORS)

        def loss(at: _Floats) -> tuple[float, _Floats]:
            now = Parameters(*np.exp(at).tolist())
            by_size, size_slope = _fading(sizes, now.reach)
            by_workers, worker_slope = _fading(workers, now.reach)
            alone, both = now.sizes**2 * by_size, now.workers**2 * by_size * by_workers
            slope = now.sizes**2 * size_slope
            slope += now.workers**2 * (size_slope * by_workers + by_size * worker_slope)
            parts = [
                *(2 * alone, slope, 2 * both, 2 * now.own**2 * same),
                *(2 * now.noise**2 * eye, 2 * now.turn**2 * together),
            ]
            total = alone + both + now.own**2 * same + now.turn**2 * together
            total += (now.noise**2 + JITTER) * eye + BY_OTHERS**2 * alike + ANY_SCALE**2
            inverse, (_, log_determinant) = np.linalg.inv(total), np.linalg.slogdet(total)
            weights, off = inverse @ seen, (at - typical) / factors
            excess = inverse - np.outer(weights, weights)
            value = (seen @ weights + log_determinant + off @ off) / 2
            gradient = [np.vdot(excess, part) / 2 for part in parts]
            return float(value), np.array(gradient) + off / factors

        ends = list(zip(typical - FARTHEST * factors, typical + FARTHEST * factors, strict=True))
        starts = dict.fromkeys([self._parameters, UNRELATED])
        fits = [
            minimize(
                loss, np.log(each), jac=True, method="L-BFGS-B", bounds=ends,
                options={"maxiter": MOST_STEPS},
            )
            for each in starts
        ]  # fmt: skip
        best = min(fits, key=lambda fit: float(fit.fun))
        return Parameters(*np.exp(best.x).tolist())
