"""Optuna without its talk. Only what loads Optuna anyway may import this."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.exceptions import ExperimentalWarning

__all__ = ["quiet"]


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
