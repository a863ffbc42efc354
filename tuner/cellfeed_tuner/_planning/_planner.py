"""What to measure next: probes first, then what may be better, then what may be the best."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Spread
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observation
from cellfeed_tuner._planning._goal import Goal

__all__ = ["LEAST_CHANCE", "NOT_WORTH", "Budget", "Planner"]

NOT_WORTH = 0.0005
"""An expected gain over the best so far that is not worth a measurement."""


class Budget(Protocol):
    """What measuring may cost."""

    def affords(self, configuration: Configuration, gain: float = 0.0) -> bool:
        """Return whether there is enough left to measure a configuration for the first time.

        This may depend on the gain over the best so far that is expected of it.
        """
        ...

    def cost(self, configuration: Configuration) -> float:
        """Return what it costs to measure a configuration for the first time, in any unit."""
        ...


# Equally likely worlds: to expect gains from, which a normal distribution smooths, and to say from
# how likely something is the best.
_N_DRAWS, _N_DRAWS_OF_CHANCES = 64, 512
# Below this probability of being the best, something is out of the race; and a single replicate
# that says so is doubted where a gain of this share is expected without it.
LEAST_CHANCE, _DOUBTED_GAIN = 0.05, 0.02
_PROBES = 4
# Relative error of a probe, where nothing is known of it yet; and the least that is expected to be
# found out by measuring anything.
_PROBE_ERROR, _LEAST_SPREAD = 0.05, 0.007


class Planner:
    """Decides what to measure, by what was measured; it measures nothing itself.

    1. *Probes*: the configurations whose replicates tell most of those that may be the best.
    2. *What may be better*: by the `CostModel`, the configuration from which the largest gain
       over the best so far is expected for what it costs, until none is worth it or can be
       afforded.
    3. *What is in doubt*: what a single replicate puts out of the race, although what was
       measured of its like says that it may be the best. Something else may have slowed it down.
    4. *What may be the best* of what was measured, and how likely that is.

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
        # Seconds per cell of each replicate.
        self._replicates: dict[Configuration, tuple[float, ...]] = {}
        self._withdrawn: set[Configuration] = set()
        self._taken_back: set[Configuration] = set()

    def ask(self, budget: Budget) -> Configuration | None:
        """Return what to measure for the first time, or None if nothing is worth it."""
        return self._probe(budget) or self._most_promising(budget)

    def tell(self, configuration: Configuration, seconds_per_cell: Sequence[float]) -> None:
        """Take note of all replicates of a configuration by now; without any, it has failed."""
        if seconds_per_cell:
            first = int(configuration in self._taken_back and len(seconds_per_cell) > 1)
            self._replicates[configuration] = tuple(seconds_per_cell[first:])
        else:
            self.withdraw(configuration)

    def withdraw(self, configuration: Configuration) -> None:
        """Leave a configuration out: it has failed, or turned out not to be feasible."""
        self._withdrawn.add(configuration)

    def withdraw_unless(self, is_feasible: Callable[[Configuration], bool]) -> None:
        """Leave out what turned out not to be feasible."""
        self._withdrawn |= {each for each in self._candidates if not is_feasible(each)}

    def add(
        self, candidates: Iterable[Configuration], goal_of: Callable[[list[Configuration]], Goal]
    ) -> None:
        """Take in more candidates.

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
        known = dict.fromkeys([*self._replicates, *self._believed, *configurations])
        place = {each: place for place, each in enumerate(known)}
        model = CostModel(list(known), self._batch_size, self._geometry)
        values = goal_of(list(known))(-self._draws(model, _N_DRAWS))
        measured = [place[each] for each in self._measured()]
        return _gains_over(values[:, measured], values[:, [place[each] for each in configurations]])

    def chances(self) -> dict[Configuration, float]:
        """Return how likely each measured configuration is the best of these, the likeliest first.

        What failed or is not feasible has none.
        """
        measured = self._measured()
        if not measured:
            return {}
        values = self._goal(-self._draws(self._model, _N_DRAWS_OF_CHANCES))
        values = values[:, [self._place[each] for each in measured]]
        wins = np.bincount(np.argmax(values, axis=1), minlength=len(measured)) / len(values)
        # The mean decides among those that never win.
        order = np.lexsort((-values.mean(axis=0), -wins))
        return {measured[place]: float(wins[place]) for place in order}

    def doubted(self) -> Configuration | None:
        """Return what should be measured a second time before it is given up; None if nothing."""
        gains = {
            each: self._gain_without_replicates_of(each)
            for each, chance in self.chances().items()
            if chance < LEAST_CHANCE
            and len(self._replicates[each]) == 1
            and each not in self._taken_back
        }
        most = max(gains, key=gains.__getitem__, default=None)
        return most if most is not None and gains[most] >= _DOUBTED_GAIN else None

    def take_back(self, configuration: Configuration) -> None:
        """Leave out the first replicate of a configuration, for which a second stands now."""
        self._taken_back.add(configuration)

    def _gain_without_replicates_of(self, configuration: Configuration) -> float:
        """Return the gain over the rest that would be expected, had it not been measured."""
        rest = {each: found for each, found in self._replicates.items() if each != configuration}
        values = self._goal(-self._draws(self._model, _N_DRAWS, rest))
        others = [self._place[each] for each in self._measured() if each != configuration]
        own = values[:, [self._place[configuration]]]
        return float(_gains_over(values[:, others], own)[0]) if others else 0.0

    def _measured(self) -> list[Configuration]:
        return [each for each in self._replicates if each not in self._withdrawn]

    def _open(self) -> NDArray[np.intp]:
        """Return the places of what was not measured and may be chosen."""
        return np.array(
            [
                place
                for place, each in enumerate(self._candidates)
                if each not in self._replicates and each not in self._withdrawn
            ],
            dtype=np.intp,
        )

    def _probe(self, budget: Budget) -> Configuration | None:
        """Return what tells most of the configurations that may be the best."""
        if self._believed or len(self._replicates) >= _PROBES:
            return None
        fresh = np.array(
            [place for place in self._open() if budget.affords(self._candidates[place])],
            dtype=np.intp,
        )
        if not fresh.size:
            return None
        for place in self._first:
            if place in fresh:
                return self._candidates[place]
        draws = self._draws(self._model, _N_DRAWS)
        best = np.argmax(self._goal(-draws), axis=1)
        wins = np.bincount(best, minlength=draws.shape[1]) / len(draws)
        apart = draws - draws.mean(axis=0)
        if not self._replicates:
            # Only differences mean something before the first replicate.
            apart = apart - apart.mean(axis=1, keepdims=True)
        covariance = apart.T @ apart / len(draws)
        told = covariance[fresh] ** 2 / (np.diag(covariance)[fresh] + _PROBE_ERROR**2)[:, None]
        return self._best_for_its_cost(fresh, told @ wins, budget)

    def _most_promising(self, budget: Budget) -> Configuration | None:
        """Return what promises the largest gain over the best so far, if that is worth it."""
        fresh = self._open()
        if not fresh.size:
            return None
        values = self._goal(-self._draws(self._model, _N_DRAWS))
        places = [self._place[each] for each in self._measured()]
        gains = _gains_over(values[:, places], values[:, fresh])
        worth = np.array(
            [
                gain >= NOT_WORTH and budget.affords(self._candidates[place], gain)
                for place, gain in zip(fresh.tolist(), gains.tolist(), strict=True)
            ]
        )
        return self._best_for_its_cost(fresh[worth], gains[worth], budget)

    def _best_for_its_cost(
        self, places: NDArray[np.intp], gains: NDArray[np.float64], budget: Budget
    ) -> Configuration | None:
        if not places.size:
            return None
        costs = np.array([budget.cost(self._candidates[place]) for place in places])
        return self._candidates[int(places[np.argmax(gains / costs)])]

    def _draws(
        self,
        model: CostModel,
        n: int,
        replicates: Mapping[Configuration, Sequence[float]] | None = None,
    ) -> NDArray[np.float64]:
        """Return what the costs may be, by the model, all replicates and what is believed.

        Or by some replicates, in place of all.
        """
        replicates = self._replicates if replicates is None else replicates
        spread = Spread.of(replicates.values())
        measured = {
            each: Observation(float(np.mean(costs)), spread.error(len(costs)))
            for each, costs in replicates.items()
        }
        return model.draw(self._believed | measured, n, self._rng)


def _gains_over(rivals: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the gain over the best rival that is expected of each column of values."""
    best = rivals.max(axis=1) if rivals.size else values.min(axis=1)
    return _expected_gains(values - best[:, None])


def _expected_gains(gains: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the expectation of what is positive in a normal distribution, for each column.

    Smoother than the mean over the draws, of which few may be positive.
    """
    mean, spread = gains.mean(axis=0), gains.std(axis=0) + _LEAST_SPREAD
    expected: NDArray[np.float64] = spread * norm.pdf(mean / spread) + mean * norm.cdf(
        mean / spread
    )
    return expected
