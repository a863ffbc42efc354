"""What to measure next: probes first, then a race of what could still be chosen."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observation
from cellfeed_tuner._planning._goal import Goal

__all__ = ["NOT_WORTH", "Budget", "Planner"]

NOT_WORTH = 0.0005
"""An expected gain over the best so far that is not worth a measurement."""


class Budget(Protocol):
    """What measuring may cost."""

    def affords(self, configuration: Configuration) -> bool:
        """Return whether there is enough left to measure a configuration."""
        ...

    def cost(self, configuration: Configuration) -> float:
        """Return what it costs to measure a configuration for the first time, in any unit."""
        ...


_N_DRAWS = 64
_PROBES = 4
# Relative spread of looks where nothing is known of it yet, and how many looks that counts.
_PRIOR_SPREAD, _PRIOR_LOOKS = 0.05, 4
# What is the best with less than this probability leaves the race.
_LEAVES = 0.02
# A mean with this relative standard error needs no further samples.
_PRECISE = 0.007
# Looks at what may be the best: without a second one, it is not known how much they differ.
_LEAST_LOOKS, _MOST_LOOKS = 2, 64
# Second and further looks, at anything, without which it is not known how much looks differ.
_LEAST_REPEATS = 4


class Planner:
    """Decides what to measure, by what was measured; it measures nothing itself.

    Ask it for a configuration, measure that, tell it, and so on, until it has none:

    1. *Probes*: the configurations whose samples tell most of those that may be the best.
    2. *What may be better*: by the `CostModel`, the configuration from which the largest gain
       over the best so far is expected for what it costs, until none is worth it or to be
       afforded.
    3. *The race*: another look at each that may still be the best, in random order, lap by lap;
       by bootstrap over the looks, a configuration leaves when it cannot win any more, and the
       race ends when one is left or all are known precisely. As the best becomes clear, others
       may be worth a first look again.

    The rounds of one look have the moment in common, and whatever else the machine did then, so
    it is looks that are counted and drawn again.

    Parameters
    ----------
    candidates
        What may be chosen: entropy and memory are known before, so nothing else is measured.
    batch_size
        Cells of a minibatch.
    geometry
        What is known of the storage.
    goal
        What is to be maximised; a gain of 0.002 is not worth a measurement.
    seed
        Fixes all that is left to chance.
    believed
        What is known of costs before anything is measured; there are no probes then.
    first
        What to begin the probes with.
    """

    def __init__(
        self,
        candidates: Sequence[Configuration],
        *,
        batch_size: int,
        geometry: Geometry,
        goal: Goal,
        seed: int,
        believed: Mapping[Configuration, Observation] | None = None,
        first: Sequence[Configuration] = (),
    ) -> None:
        self._candidates = list(candidates)
        self._place = {each: place for place, each in enumerate(self._candidates)}
        self._batch_size, self._geometry = batch_size, geometry
        self._model = CostModel(self._candidates, batch_size, geometry)
        self._goal = goal
        self._rng = np.random.default_rng(seed)
        self._believed = dict(believed or {})
        self._first = [self._place[each] for each in first]
        # The mean of each look.
        self._samples: dict[Configuration, NDArray[np.float64]] = {}
        # How far each look is from their mean, and what a look may be off by its own rounds alone;
        # then the former of all, with a few that stand for what is usual.
        self._residuals: dict[Configuration, NDArray[np.float64]] = {}
        self._own_errors: dict[Configuration, list[float]] = {}
        self._pool = np.empty(0)
        self._withdrawn: set[Configuration] = set()
        self._left: set[Configuration] = set()
        self._lap: list[Configuration] = []

    def ask(self, budget: Budget) -> Configuration | None:
        """Return what to measure next, or None if nothing is worth it or to be afforded."""
        if not self._lap:
            fresh = self._probe(budget) or self._most_promising(budget)
            if fresh is not None:
                return fresh
            self._lap = self._next_lap()
        while self._lap:
            rival = self._lap.pop()
            if budget.affords(rival) and rival not in self._withdrawn:
                return rival
        return None

    def tell(self, configuration: Configuration, looks: Sequence[Sequence[float]]) -> None:
        """Take note of all looks that there were at a configuration by now.

        Parameters
        ----------
        configuration
            The settings.
        looks
            Seconds per cell: samples of each look. A configuration without any has failed.
        """
        found = [np.asarray(each, dtype=np.float64) for each in looks if len(each)]
        if not found:
            self.withdraw(configuration)
            return
        means = np.array([each.mean() for each in found])
        self._samples[configuration] = means
        self._residuals[configuration] = _residuals(means)
        self._own_errors[configuration] = [_own_error(each) for each in found if each.size > 1]
        errors = np.concatenate([np.empty(0), *self._own_errors.values()])
        usual = max(_PRIOR_SPREAD, float(np.sqrt(np.mean(errors**2))) if errors.size else 0.0)
        self._pool = np.concatenate(
            [usual * np.array([-1.0, -1.0, 1.0, 1.0]), *self._residuals.values()]
        )

    def withdraw(self, configuration: Configuration) -> None:
        """Leave a configuration out: it has failed, or turned out not to be feasible."""
        self._withdrawn.add(configuration)

    def add(
        self, candidates: Iterable[Configuration], goal_of: Callable[[list[Configuration]], Goal]
    ) -> None:
        """Take in more candidates; they are considered before the race goes on.

        Parameters
        ----------
        candidates
            What else may be chosen; those that are there already change nothing.
        goal_of
            Gives the goal over a list of candidates.
        """
        self._candidates = list(dict.fromkeys([*self._candidates, *candidates]))
        self._place = {each: place for place, each in enumerate(self._candidates)}
        self._model = CostModel(self._candidates, self._batch_size, self._geometry)
        self._goal = goal_of(self._candidates)
        self._lap = []

    def gains(
        self,
        configurations: Sequence[Configuration],
        goal_of: Callable[[list[Configuration]], Goal],
    ) -> NDArray[np.float64]:
        """Return the gain over the best so far that is expected of any configurations.

        Parameters
        ----------
        configurations
            Candidates or not, shape (n,).
        goal_of
            Gives the goal over a list of configurations.
        """
        known = dict.fromkeys([*self._samples, *self._believed, *configurations])
        place = {each: place for place, each in enumerate(known)}
        model = CostModel(list(known), self._batch_size, self._geometry)
        values = goal_of(list(known))(-self._draws(model))
        racing = [place[each] for each in self._racing()]
        return _gains_over(values[:, racing], values[:, [place[each] for each in configurations]])

    def is_racing(self, configuration: Configuration) -> bool:
        """Return whether a configuration was measured and may still be the best."""
        left = self._left | self._withdrawn
        return configuration in self._samples and configuration not in left

    def _open(self, budget: Budget) -> NDArray[np.intp]:
        """Return the places of what was not measured and can be."""
        return np.array(
            [
                place
                for place, each in enumerate(self._candidates)
                if each not in self._samples
                and each not in self._withdrawn
                and budget.affords(each)
            ],
            dtype=np.intp,
        )

    def _probe(self, budget: Budget) -> Configuration | None:
        """Return what tells most of the configurations that may be the best."""
        if self._believed or len(self._samples) >= _PROBES:
            return None
        fresh = self._open(budget)
        if not fresh.size:
            return None
        for place in self._first:
            if place in fresh:
                return self._candidates[place]
        draws = self._draws(self._model)
        wins = np.bincount(self._best_of(draws), minlength=draws.shape[1]) / len(draws)
        apart = draws - draws.mean(axis=0)
        if not self._samples:
            # Only differences mean something before the first sample.
            apart = apart - apart.mean(axis=1, keepdims=True)
        covariance = apart.T @ apart / len(draws)
        told = covariance[fresh] ** 2 / (np.diag(covariance)[fresh] + _PRIOR_SPREAD**2)[:, None]
        return self._best_for_its_cost(fresh, told @ wins, budget)

    def _most_promising(self, budget: Budget) -> Configuration | None:
        """Return what promises the largest gain over the best so far, if that is worth it."""
        fresh = self._open(budget)
        if not fresh.size:
            return None
        values = self._goal(-self._draws(self._model))
        places = [self._place[each] for each in self._racing()]
        gains = _gains_over(values[:, places], values[:, fresh])
        worth = gains >= NOT_WORTH
        return self._best_for_its_cost(fresh[worth], gains[worth], budget)

    def _best_for_its_cost(
        self, places: NDArray[np.intp], gains: NDArray[np.float64], budget: Budget
    ) -> Configuration | None:
        if not places.size:
            return None
        costs = np.array([budget.cost(self._candidates[place]) for place in places])
        return self._candidates[int(places[np.argmax(gains / costs)])]

    def _racing(self) -> list[Configuration]:
        return [each for each in self._samples if each not in self._withdrawn]

    def _next_lap(self) -> list[Configuration]:
        """Return the rivals in random order, those first (from the end) that have few looks.

        Of these, what is likely to be the best goes first, for what a look costs.
        """
        wins = self._rivals()
        lap = list(wins)
        self._rng.shuffle(lap)
        lap.sort(
            key=lambda each: (
                self._samples[each].size < _LEAST_LOOKS and wins[each] / each.minibatches_per_round
            )
        )
        return lap

    def _rivals(self) -> dict[Configuration, float]:
        """Return what may still be the best and is not known precisely, with how likely it is."""
        racing = self._racing()
        if not racing:
            return {}
        draws = np.full((_N_DRAWS, len(self._candidates)), np.inf)
        places = [self._place[each] for each in racing]
        draws[:, places] = np.column_stack([self._bootstrap(each) for each in racing])
        wins = np.bincount(self._best_of(draws), minlength=draws.shape[1]) / len(draws)
        rivals = {each: win for each in racing if (win := wins[self._place[each]]) >= _LEAVES}
        rivals |= dict.fromkeys(self._worth_repeating(racing, rivals), _LEAVES)
        self._left = set(racing) - set(rivals)
        alone = len(rivals) == 1
        return {
            each: win for each, win in rivals.items() if not self._is_settled(each, alone=alone)
        }

    def _worth_repeating(
        self, racing: Sequence[Configuration], rivals: Collection[Configuration]
    ) -> list[Configuration]:
        """Return the best of the others, as long as it is not known how much looks differ.

        Otherwise what was lucky twice would be alone, and nothing would tell that it was luck.
        """
        n_repeats = sum(self._samples[each].size - 1 for each in racing)
        n_to_come = sum(self._samples[each].size < _LEAST_LOOKS for each in rivals)
        others = [each for each in racing if each not in rivals and self._samples[each].size == 1]
        places = [self._place[each] for each in others]
        costs = np.full(len(self._candidates), np.inf)
        costs[places] = [float(np.log(self._samples[each].mean())) for each in others]
        order = np.argsort(-self._goal(-costs)[places], kind="stable")
        return [others[place] for place in order[: max(0, _LEAST_REPEATS - n_repeats - n_to_come)]]

    def _is_settled(self, configuration: Configuration, *, alone: bool) -> bool:
        """Return whether no more looks at a configuration are needed."""
        n = self._samples[configuration].size
        if n < _LEAST_LOOKS:
            return False
        return alone or n >= _MOST_LOOKS or self._error(configuration) <= _PRECISE

    def _best_of(self, draws: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return the place of the best in each draw of logarithms of seconds per cell."""
        best: NDArray[np.intp] = np.argmax(self._goal(-draws), axis=1)
        return best

    def _draws(self, model: CostModel) -> NDArray[np.float64]:
        """Return what the costs may be: by own samples, else by the model and what is believed."""
        measured = {
            each: Observation(float(samples.mean()), self._error(each))
            for each, samples in self._samples.items()
        }
        draws = model.draw(self._believed | measured, _N_DRAWS, self._rng)
        place = {each: place for place, each in enumerate(model.configurations)}
        for each in measured:
            draws[:, place[each]] = self._bootstrap(each)
        return draws

    def _bootstrap(self, configuration: Configuration) -> NDArray[np.float64]:
        """Return logarithms of what a mean may be, by drawing its looks again.

        As a few looks say little of their own spread, some are drawn from all residuals.
        """
        samples = self._samples[configuration]
        n = samples.size
        own, pool = self._residuals[configuration], self._pool
        shape = (_N_DRAWS, n)
        redrawn = self._rng.choice(pool, shape)
        if own.size:
            from_own = self._rng.random(shape) < n / (n + _PRIOR_LOOKS)
            redrawn = np.where(from_own, self._rng.choice(own, shape), redrawn)
        means: NDArray[np.float64] = samples.mean() * np.maximum(1 + redrawn.mean(axis=1), 0.1)
        return np.log(means)

    def _error(self, configuration: Configuration) -> float:
        """Return the relative standard error of a configuration's mean."""
        n = self._samples[configuration].size
        own, pool = self._residuals[configuration], self._pool
        variance = (own @ own + _PRIOR_LOOKS * (pool @ pool) / pool.size) / (
            own.size + _PRIOR_LOOKS
        )
        return float(np.sqrt(variance / n))


def _residuals(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return relative departures from the mean, free of its being nearer to them than the truth."""
    if samples.size < 2:  # noqa: PLR2004 - a spread needs two
        return np.empty(0)
    residuals: NDArray[np.float64] = samples / samples.mean() - 1
    residuals *= np.sqrt(samples.size / (samples.size - 1))
    return residuals


def _own_error(samples: NDArray[np.float64]) -> float:
    """Return the relative standard error of a mean, by its samples."""
    return float(samples.std(ddof=1) / np.sqrt(samples.size) / samples.mean())


def _gains_over(rivals: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the gain over the best rival that is expected of each column of values."""
    best = rivals.max(axis=1) if rivals.size else values.min(axis=1)
    return _expected_gains(values - best[:, None])


def _expected_gains(gains: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the expectation of what is positive in a normal distribution, for each column.

    Smoother than the mean over the draws, of which few may be positive.
    """
    mean, spread = gains.mean(axis=0), gains.std(axis=0) + _PRECISE
    expected: NDArray[np.float64] = spread * norm.pdf(mean / spread) + mean * norm.cdf(
        mean / spread
    )
    return expected
