"""What to try next by Optuna's samplers; only a search that goes by one imports this."""

from collections.abc import Callable, Mapping, Sequence
from math import hypot, log2
from typing import Any

import numpy as np
import optuna
from optuna.distributions import IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import create_trial

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._planning._constants import RANDOM_TRIALS
from cellfeed_tuner._quiet_optuna import distributions, quiet

__all__ = ["Proposals"]

_BY_NAME: Mapping[str, Callable[[int], BaseSampler]] = {
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=RANDOM_TRIALS),
    "random": lambda seed: RandomSampler(seed=seed),
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS),
}


class Proposals:
    """Asks a sampler of Optuna, or one of that name, for settings within those of configurations.

    It is shown all that was measured as if that had come to its end, since it would learn nothing
    of what is still raced otherwise.
    """

    def __init__(
        self, sampler: str | BaseSampler, configurations: Sequence[Configuration], seed: int
    ) -> None:
        with quiet():
            self._sampler = _BY_NAME[sampler](seed) if isinstance(sampler, str) else sampler
        self._space = distributions(configurations)

    def next_of(
        self,
        candidates: Sequence[Configuration],
        seconds_per_cell: Mapping[Configuration, Sequence[float]],
    ) -> Configuration:
        """Return the candidate next to what the sampler asks for, by all looks so far."""
        with quiet():
            study = optuna.create_study(sampler=self._sampler)
            for each, looks in seconds_per_cell.items():
                value = float(np.mean(looks))
                study.add_trial(
                    create_trial(params=dict(each), distributions=self._space, value=value)
                )
            wanted = study.ask(self._space).params
        return min(candidates, key=lambda each: self._distance(each, wanted))

    def _distance(self, configuration: Configuration, wanted: Mapping[str, Any]) -> float:
        """Return how many doublings two settings are apart; workers are counted from 1.

        What is no size is one apart where it differs.
        """
        own: Mapping[str, Any] = configuration
        return hypot(
            *(
                log2((1 + own[name]) / (1 + wanted[name]))
                if isinstance(each, IntDistribution) and each.low >= 0
                else float(own[name] != wanted[name])
                for name, each in self._space.items()
            )
        )
