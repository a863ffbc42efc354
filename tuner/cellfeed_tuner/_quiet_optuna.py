"""Optuna without its messages. Only what loads Optuna anyway imports this."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.exceptions import ExperimentalWarning

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from logging every study that it makes or finds."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Before version 5, it warns about samplers that our tests cover.
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
