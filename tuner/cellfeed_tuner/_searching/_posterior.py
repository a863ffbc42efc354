"""The distribution of each candidate's cost, given the cost model and all replicates.

It says which candidate may be the best: the fastest, or the best mixed that is fast enough.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, log1p, sqrt
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from cellfeed_tuner._choose import Goal
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import LEAST_CHANCE
from cellfeed_tuner._interval import CONFIDENCE, USUAL_FREEDOM, Estimate, positive_estimate
from cellfeed_tuner._searching._cost_model import (
    ASSUMPTIONS,
    Assumption,
    CostModel,
    Geometry,
    Observations,
    draws_of,
)

# Draws of all costs for computing probabilities, and the number of most promising configurations
# for which they are drawn. Chosen: a probability of 5 % is then known to 1 %.
N_DRAWS, MOST_DRAWN = 512, 128
# Quantile of the difference from the leader that selects its challenger. Chosen: one standard
# deviation.
OPTIMISM = 0.84
# Expected gain over the best that earns a second replicate for a configuration that leaves the
# race after one. Chosen: a configuration that close is as good.
DOUBTED_GAIN = 0.05
# What counts as faster than the recommended configuration, and the probability below which an
# assumption does not count. Chosen: as the last; as exact as the draws.
CLEARLY_FASTER, NO_CHANCE = 0.05, 0.01
# Logarithm of the odds of each of the following variances against the next larger one, before
# anything is measured. Chosen: about two to one, since most machines do little else.
TURN_ODDS = 0.7
# How much turns may differ: the variance of what affects a whole turn, relative to that of
# replicates within a turn. Chosen.
TURN_VARIANCES = (0.0, 0.3, 1.0, 3.0, 10.0, 100.0, 1e3, 1e4, 1e6)
# Sum of squares below which nothing differs, and share of the largest that counts as rounding.
# Chosen.
NOTHING, NEXT_TO_NOTHING = 1e-15, 1e-10
# A configuration with fewer turns than this share of the most has left the race. Chosen.
FINALIST_SHARE = 0.5

# Measurements in turns: how fast configurations are relative to each other.

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
    # The place of each setting in the fit, and the fit, until there are more turns.
    _fitted: "tuple[dict[Setting, int], _Fit] | None" = field(
        default=None, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, cells_per_second: Mapping[Setting, float]) -> None:
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
        place, fit = self._fit()
        least = FINALIST_SHARE * max(counts.values())
        often = [each for each, count in counts.items() if count >= least]
        return sorted(often, key=lambda each: -fit.effects[place[each]])

    def ratio(self, one: Setting, other: Setting) -> Estimate | None:
        """Return the ratio of two throughputs, with its 95 % interval.

        None if they were in no two turns together.
        """
        if self.count_together(one, other) <= 1:
            return None
        place, fit = self._fit()
        contrast = np.zeros(fit.effects.size)
        contrast[place[one]], contrast[place[other]] = 1.0, -1.0
        difference = float(contrast @ fit.effects)
        error = float(np.sqrt(contrast @ fit.covariance @ contrast))
        half = float(stdtrit(fit.freedom, (1 + CONFIDENCE) / 2)) * error
        return Estimate(exp(difference), exp(difference - half), exp(difference + half))

    def _fit(self) -> "tuple[dict[Setting, int], _Fit]":
        if self._fitted is None:
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
            self._fitted = place, likeliest
        return self._fitted


def effects(
    replicates: Sequence[Sequence[tuple[int, float]]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the means of settings, free of the turns in which they were measured.

    Of each setting, its replicates: the turn of each, and its value. Also returns the covariance of
    the means if errors, of replicates and their turns together, have variance 1.

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
    return fit.effects, fit.inverse / (1 + fit.turn_variance)


def _design(
    rows: Sequence[tuple[int, int, float]], n_settings: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return indicators of settings and of turns, and values, of (turn, setting, value)."""
    n_turns = 1 + max(turn for turn, *_ in rows)
    settings, turns = (np.zeros((len(rows), n)) for n in (n_settings, n_turns))
    for row, (turn, column, _) in enumerate(rows):
        settings[row, column] = turns[row, turn] = 1.0
    return settings, turns, np.array([value for *_, value in rows])


class _Fit(NamedTuple):
    """Effects of settings, up to a common constant."""

    effects: NDArray[np.float64]
    covariance: NDArray[np.float64]
    freedom: float
    log_likelihood: float
    turn_variance: float
    inverse: NDArray[np.float64]


def _likeliest(
    settings: NDArray[np.float64], turns: NDArray[np.float64], logs: NDArray[np.float64]
) -> _Fit:
    """Return the fit whose variance of turns is the likeliest; a small one is so beforehand."""
    fits = [_least_squares(settings, turns, logs, share) for share in TURN_VARIANCES]
    place = max(range(len(fits)), key=lambda each: fits[each].log_likelihood - TURN_ODDS * each)
    return fits[place]


def _least_squares(
    settings: NDArray[np.float64],
    turns: NDArray[np.float64],
    logs: NDArray[np.float64],
    turn_variance: float,
) -> _Fit:
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
        return _Fit(effects, nothing, max(1.0, freedom), inf, turn_variance, inverse)
    log_likelihood = -inf
    if turn_variance < inf:
        _, log_of_information = np.linalg.slogdet(information)
        log_of_errors = -float(np.log1p(turn_variance * n_looks).sum())
        log_likelihood = (log_of_errors - log_of_information - freedom * log(squares)) / 2
    # Effects of turns cost degrees of freedom, as far as they matter.
    paid = float(shrunk @ n_looks) * (1 - 1 / n_looks.size)
    freedom_left = max(1.0, freedom - min(paid, len(turns.T) - 1))
    covariance = squares / freedom * inverse
    return _Fit(effects, covariance, freedom_left, log_likelihood, turn_variance, inverse)


class Replicate(NamedTuple):
    """Seconds per cell in one replicate, the turn in which it was measured, and its own number."""

    seconds_per_cell: float
    turn: int
    number: int = 0


class Posterior:
    """The costs of configurations, as far as they are known.

    Parameters
    ----------
    configurations, candidates
        Those that can run, and those of them that may be chosen by entropy and memory.
    goal_of
        Returns the goal for a list of configurations.
    model
        Predicts costs before any measurement.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        candidates: Iterable[Configuration],
        *,
        batch_size: int,
        geometry: Geometry,
        goal_of: Callable[[Sequence[Configuration]], Goal],
        seed: int,
        model: Callable[[Sequence[Configuration], int, Geometry], CostModel] = CostModel,
    ) -> None:
        self._batch_size, self._geometry, self._new_model = batch_size, geometry, model
        self._goal_of, self._seed = goal_of, seed
        # Of each configuration, and how often they were updated.
        self._replicates: dict[Configuration, tuple[Replicate, ...]] = {}
        self._n_updates = 0
        # Configurations whose first replicate does not count, and those not doubted again.
        self._taken_back: set[Configuration] = set()
        self._trusted: set[Configuration] = set()
        self._candidates = dict.fromkeys(candidates)
        # Derived from them, until there are more.
        self._moments: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        self._values: NDArray[np.float64] | None = None
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
        if replicates:
            is_doubted = configuration in self._taken_back and len(replicates) > 1
            self._replicates.pop(configuration, None)  # the last one measured comes last
            self._replicates[configuration] = tuple(replicates[is_doubted:])
            self._n_updates += 1
            self._forget()
        else:
            self.withdraw(configuration)

    def withdraw(self, configuration: Configuration) -> None:
        """Leave out a configuration that has failed, or is not feasible after all."""
        self._candidates.pop(configuration, None)

    def add(self, candidates: Iterable[Configuration]) -> None:
        """Add new candidates."""
        new = [each for each in candidates if each not in self._place]
        if new:
            self._candidates |= dict.fromkeys(new)
            self._set([*self._place, *new])

    def aim_anew(self) -> None:
        """Update the goal, since more is known about entropies."""
        self._goal = self._goal_of(list(self._place))
        self._forget()

    def seconds_per_cell(self) -> Mapping[Configuration, float]:
        """Return the median cost of each configuration; empty before any measurement."""
        if not self._costs and self._replicates:
            mean = np.exp(self._known()[0])
            self._costs = dict(zip(self._place, mean.tolist(), strict=True))
        return self._costs

    def error(self, configuration: Configuration) -> float:
        """Return the standard deviation of the logarithm of a cost."""
        place = self._place[configuration]
        return sqrt(max(0.0, self._known()[1][place, place]))

    def speed(self, configuration: Configuration) -> Estimate | None:
        """Return cells per second, with their 95 % interval; None before any measurement."""
        if not self._replicates or configuration not in self._place:
            return None
        mean = self._known()[0][self._place[configuration]]
        return positive_estimate(exp(-mean), self.error(configuration), self._freedom)

    def ratio(self, one: Configuration, other: Configuration) -> Estimate | None:
        """Return one throughput divided by another, with its 95 % interval.

        It rests on all measurements, and on the cost model as far as they leave it open. None
        before any measurement.
        """
        if not self._replicates or not {one, other} <= self._place.keys():
            return None
        first, second = self._place[one], self._place[other]
        mean, covariance = self._known()
        variance = covariance[first, first] + covariance[second, second]
        variance = max(0.0, float(variance - 2 * covariance[first, second]))
        return positive_estimate(exp(mean[second] - mean[first]), sqrt(variance), self._freedom)

    @property
    def _freedom(self) -> float:
        """Degrees of freedom of the spread of replicates; its prior has some."""
        return USUAL_FREEDOM + sum(len(each) - 1 for each in self._replicates.values())

    def most_promising(self, among: Iterable[Configuration]) -> Configuration | None:
        """Return the configuration that was expected to be the best before any measurement.

        After one measurement, those most similar to it would come next, and little be learnt.
        """
        expected = self._goal(-self._model.mean())
        return max(among, key=lambda each: expected[self._place[each]], default=None)

    def leader(self, among: Collection[Configuration]) -> Configuration | None:
        """Return the configuration that is now expected to be the best."""
        mean = self._drawn().mean(axis=0)
        return max(among, key=lambda each: mean[self._place[each]], default=None)

    def challenger(
        self, leader: Configuration, among: Collection[Configuration]
    ) -> Configuration | None:
        """Return the one that may surpass the leader by most, at one standard deviation."""
        values = self._drawn()
        leads = np.quantile(values - values[:, [self._place[leader]]], OPTIMISM, axis=0)
        return max(among, key=lambda each: leads[self._place[each]], default=None)

    def gains(self, least: float, among: Iterable[Configuration]) -> dict[Configuration, float]:
        """Return the expected improvement of each over a value."""
        gains = np.maximum(0.0, self._drawn() - least).mean(axis=0)
        return {each: float(gains[self._place[each]]) for each in among}

    def chances(self) -> dict[Configuration, float]:
        """Return the probability that each candidate is the best, the likeliest first."""
        places = [self._place[each] for each in self._candidates]
        if not places:
            return {}
        values = self._drawn()[:, places]
        wins = np.bincount(np.argmax(values, axis=1), minlength=len(places)) / len(values)
        # The mean decides among those that never win.
        order = np.lexsort((-values.mean(axis=0), -wins)).tolist()
        names = list(self._candidates)
        return {names[place]: float(wins[place]) for place in order}

    @property
    def is_contradicted(self) -> bool:
        """Whether costs that have nothing in common explain what was measured better."""
        return sum(chance for each, chance, _ in self._weighed() if not each.has_terms) > 1 / 2

    def chance_of_faster(self, configuration: Configuration) -> float:
        """Return the probability that any candidate that was not measured is clearly faster.

        By more than `CLEARLY_FASTER`, on average over all assumptions about costs.
        """
        others = self._candidates.keys() - self._replicates.keys() - {configuration}
        if not others or not self._replicates or configuration not in self._place:
            return 0.0
        new = np.sort([self._place[each] for each in others])
        total = 0.0
        for assumption, chance, spread in self._weighed():
            if chance < NO_CHANCE:
                continue
            observations = self._observations(self._replicates, spread)
            mean, covariance = self._model.posterior(observations, assumption)
            errors = np.sqrt(np.maximum(0.0, covariance.diagonal()))
            promising = np.argsort((mean - 2 * errors)[new], kind="stable")[:MOST_DRAWN]
            places = np.array([self._place[configuration], *new[promising]])
            rng = np.random.default_rng((self._seed, self._n_updates))
            logs = draws_of(mean[places], covariance[np.ix_(places, places)], N_DRAWS, rng)
            is_faster = logs[:, :1] - logs[:, 1:] > log1p(CLEARLY_FASTER)
            total += chance * float(is_faster.any(axis=1).mean())
        return total

    def doubted(self) -> Configuration | None:
        """Return a promising configuration that a single replicate put out of the race, if any.

        Another program may have slowed it down. None is doubted twice.
        """
        chances = self.chances()
        for each, chance in chances.items():
            replicates = self._replicates.get(each, ())
            if chance >= LEAST_CHANCE or len(replicates) != 1 or each in self._trusted:
                continue
            self._trusted.add(each)
            others = {one: own for one, own in self._replicates.items() if one != each}
            if others and self._gain_over(others, each) >= DOUBTED_GAIN:
                return each
        return None

    def _gain_over(
        self, others: Mapping[Configuration, Sequence[Replicate]], configuration: Configuration
    ) -> float:
        """Return the gain over the best of others that is expected without measuring it."""
        mean, covariance = self._posterior_of(others)
        places = [self._place[each] for each in [*others, configuration]]
        rng = np.random.default_rng((self._seed, self._n_updates))
        logs = np.tile(mean, (N_DRAWS, 1))
        logs[:, places] = draws_of(mean[places], covariance[np.ix_(places, places)], N_DRAWS, rng)
        values = self._goal(-logs)[:, places]
        gains = values[:, -1] - values[:, :-1].max(axis=1)
        return float(np.maximum(0.0, gains).mean())

    def take_back(self, configuration: Configuration) -> None:
        """Leave out the first replicate of a configuration as soon as there is a second."""
        self._taken_back.add(configuration)

    def _set(self, configurations: Sequence[Configuration]) -> None:
        self._place = {each: place for place, each in enumerate(configurations)}
        self._model = self._new_model(configurations, self._batch_size, self._geometry)
        self._goal = self._goal_of(configurations)
        self._forget()

    def _forget(self) -> None:
        self._values, self._costs, self._moments = None, {}, None

    def _known(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if self._moments is None:
            self._moments = self._posterior_of(self._replicates)
        return self._moments

    def _drawn(self) -> NDArray[np.float64]:
        """Return draws of the values to maximize, shape (n_draws, n_configurations).

        Unpromising configurations have their mean in all draws.
        """
        if self._values is None:
            mean, covariance = self._known()
            rng = np.random.default_rng((self._seed, self._n_updates))
            promising = self._goal(-mean + 2 * np.sqrt(np.maximum(0.0, covariance.diagonal())))
            drawn = np.argsort(-promising, kind="stable")[:MOST_DRAWN]
            logs = np.tile(mean, (N_DRAWS, 1))
            logs[:, drawn] = draws_of(mean[drawn], covariance[np.ix_(drawn, drawn)], N_DRAWS, rng)
            self._values = self._goal(-logs)
        return self._values

    def _posterior_of(
        self, replicates: Mapping[Configuration, Sequence[Replicate]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and covariance of the logarithms of costs, under the first assumption."""
        if not replicates:
            return self._model.posterior(Observations.none())
        spread = self._model.fit(_seconds(replicates)).spread
        return self._model.posterior(self._observations(replicates, spread))

    def _weighed(self) -> list[tuple[Assumption, float, float]]:
        """Return each assumption, its probability, and the spread of replicates under it."""
        if not self._replicates:
            return []
        seconds = _seconds(self._replicates)
        fits = [self._model.fit(seconds, each) for each in ASSUMPTIONS]
        logs = np.array([each.log_evidence for each in fits])
        chances = np.exp(logs - logs.max()) * [each.prior for each in ASSUMPTIONS]
        chances /= chances.sum()
        spreads = [each.spread for each in fits]
        return list(zip(ASSUMPTIONS, chances.tolist(), spreads, strict=True))

    @staticmethod
    def _observations(
        replicates: Mapping[Configuration, Sequence[Replicate]], spread: float
    ) -> Observations:
        """Return the mean of each configuration, free of the turns that it was measured in."""
        means, covariance = effects(
            [[(one.turn, log(one.seconds_per_cell)) for one in own] for own in replicates.values()]
        )
        return Observations(list(replicates), means, spread**2 * covariance)


def _seconds(
    replicates: Mapping[Configuration, Sequence[Replicate]],
) -> dict[Configuration, list[float]]:
    return {each: [one.seconds_per_cell for one in own] for each, own in replicates.items()}
