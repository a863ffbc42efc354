"""Optuna without its talk, and told of settings. Only what loads Optuna anyway imports this."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning

from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._planning._space import are_sizes

__all__ = ["distributions", "quiet"]


def distributions(configurations: Sequence[Configuration]) -> dict[str, BaseDistribution]:
    """Return what each setting of some configurations may be: of sizes, all between their ends."""
    return {
        name: _distribution([each[name] for each in configurations]) for name in configurations[0]
    }


def _distribution(values: Sequence[Setting]) -> BaseDistribution:
    if not are_sizes(values):
        return CategoricalDistribution(list(dict.fromkeys(values)))
    sizes = cast("Sequence[int]", values)
    return IntDistribution(min(sizes), max(sizes), log=min(sizes) > 0)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from telling of every study that it makes or finds."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Before version 5, it warns of samplers that we have tested.
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
