"""One opened loader in the measuring process, and what is kept of its minibatches."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from cellfeed import ParameterError, Statistics
from cellfeed_tuner._entropy._minibatch_entropy import entropies_of
from cellfeed_tuner._measuring._events import Delivery, Entropies, by_round
from cellfeed_tuner._measuring._timing_settings import TimingSettings
from cellfeed_tuner._subject._tunable import Tunable

__all__ = ["EpochTooShortError", "Session"]


class EpochTooShortError(ParameterError):
    """An epoch has too few whole fetches to time any."""


class Session:
    """A loader of any kind, opened with the settings of a request.

    Parameters
    ----------
    tunable
        The loader.
    request
        What is timed.

    Attributes
    ----------
    files
        What it reads.
    is_mapped
        Whether it may have mapped them into memory.
    loader
        What is iterated over, epoch after epoch.
    n_rounds
        Rounds of whole fetches in an epoch.
    n_asked
        Fetches that are asked of a server at the start of an epoch.
    n_threads, n_function_threads
        As in `Started`.

    Raises
    ------
    EpochTooShortError
        An epoch is shorter than a fetch, or, with workers, than two.
    """

    is_mapped = True
    n_asked = 0
    n_threads, n_function_threads = 1, 0

    def __init__(self, tunable: Tunable, request: TimingSettings) -> None:
        self._tunable, self._request = tunable, request
        self.files: tuple[Path, ...] = tunable.paths
        _seed((request.seed, request.number, *([request.rank] if request.rank else [])))
        self.loader: Any = tunable.open(request.configuration)
        self._n_minibatches = self._length()
        self.n_rounds = self._n_minibatches // request.configuration.minibatches_per_round
        least = 2 if request.configuration.num_workers else 1
        if self.n_rounds < least:
            needed = least * request.configuration.minibatches_per_round
            msg = (
                f"an epoch has {self._n_minibatches} minibatches, but {request.configuration} "
                f"needs {needed} to be timed: {least} whole fetch{'es' if least > 1 else ''}"
            )
            raise EpochTooShortError(msg)
        self._labels: dict[str, list[NDArray[Any]]] = {name: [] for name in request.labels}

    def begin_epoch(self) -> Any:
        """Return what is iterated over for one more epoch."""
        return self.loader

    def take(self, minibatch: Any) -> None:
        """Keep the labels of a minibatch; None stands for one that did not come.

        Raises
        ------
        ParameterError
            It did not come, or lacks a label, or is not whole.
        """
        if minibatch is None:
            msg = f"the loader ended early: it should have {self._n_minibatches} minibatches"
            raise ParameterError(msg)
        if not self._labels:
            return
        found = self._tunable.labels_of(minibatch)
        for name, kept in self._labels.items():
            values = np.asarray(found[name]) if name in found else np.empty(0)
            if values.shape != (self._request.batch_size,):
                msg = (
                    f"`labels_of` of {self._tunable.name} gives {name} of shape {values.shape} "
                    f"for a minibatch of {self._request.batch_size}; give a value for each row, "
                    "and open the loader with whole minibatches only"
                )
                raise ParameterError(msg)
            kept.append(values)

    def size_of(self, minibatch: Any) -> int:  # noqa: ARG002 - of a minibatch of any kind
        """Return the bytes of a minibatch; 0 if that is not known."""
        return 0

    def statistics(self) -> Statistics | None:
        """Return what the loader has counted so far; None if it does not count."""
        return None

    def findings(self) -> Iterator[object]:
        """Yield what is known at the end: whether all came as it should, and entropies."""
        yield Delivery("")
        for name, kept in self._labels.items():
            codes, _ = pd.factorize(np.stack(kept).ravel())  # what is missing becomes -1
            bits = entropies_of(codes.reshape(len(kept), -1))
            per_round = self._request.configuration.minibatches_per_round
            yield Entropies(name, by_round(bits, per_round))

    def _length(self) -> int:
        """Return how many whole minibatches an epoch has."""
        try:
            return len(self.loader)
        except TypeError:
            sizes = [len(np.asarray(each)) for each in self._tunable.labels.values()]
            if not sizes:
                msg = f"{self._tunable.name} opens a loader without `len()`; give it `labels`"
                raise ParameterError(msg) from None
            return sizes[0] // self._request.ranks.n_total // self._tunable.batch_size


def _seed(words: tuple[int, ...]) -> None:
    """Seed the global generators, so that each measurement, and each rank, reads other rows."""
    (word,) = np.random.SeedSequence(words).generate_state(1).tolist()
    random.seed(word)
    np.random.seed(word)  # noqa: NPY002 - where other loaders draw from
    torch.manual_seed(word)
