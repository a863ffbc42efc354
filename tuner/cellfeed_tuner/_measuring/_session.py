"""A loader opened in the measuring process, and the rows and labels that it delivers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from cellfeed import Minibatch, ParameterError, Statistics
from cellfeed.machine import threads_per_process
from cellfeed.stages import begin_with_requests, requests_under_way
from cellfeed_tuner._constants import REMOTE_PREFETCH
from cellfeed_tuner._entropy._minibatch_entropy import conditional_entropies_of, entropies_of
from cellfeed_tuner._entropy._plan_replay import by_round
from cellfeed_tuner._measuring._checks import cells_needed
from cellfeed_tuner._measuring._delivery import Delivered, DeliveredCell, sampled_cells
from cellfeed_tuner._measuring._events import Findings, TimingSettings
from cellfeed_tuner._subject._labels import LabelWithin
from cellfeed_tuner._subject._selected import Selected
from cellfeed_tuner._subject._tunable import Tunable

__all__ = ["DatasetSession", "EpochTooShortError", "Session"]


class EpochTooShortError(ParameterError):
    """An epoch has too few whole fetches to time any."""


class Session:
    """A loader of any kind, opened with the settings of a request.

    If ``is_mapped``, ``files`` may be mapped into memory. An epoch has ``n_rounds`` of whole
    fetches; without any, or with workers and fewer than two, it is too short. At its start,
    ``n_asked`` fetches are requested from a server. For threads, see `Started`.
    """

    is_mapped = True
    n_asked = 0
    n_threads, n_function_threads = 1, 0

    def __init__(self, tunable: Tunable, request: TimingSettings) -> None:
        self._tunable, self._request = tunable, request
        self.files = tunable.paths
        _seed((request.seed, request.number, *([request.rank] if request.rank else [])))
        self._loader: Any = tunable.open(request.configuration)
        self._n_minibatches = self._length()
        self.n_rounds = self._n_minibatches // request.configuration.minibatches_per_round
        if (needed := cells_needed(request.configuration, 1)) > self._n_minibatches:
            n = needed // request.configuration.minibatches_per_round
            msg = (
                f"an epoch has {self._n_minibatches} minibatches, but {request.configuration} "
                f"needs {needed} to be timed: {n} whole fetch{'es' if n > 1 else ''}"
            )
            raise EpochTooShortError(msg)
        self._labels: dict[str, list[NDArray[Any]]] = {name: [] for name in request.labels}

    def begin_epoch(self) -> Any:
        """Return the iterable of one more epoch."""
        return self._loader

    def take(self, minibatch: Any) -> None:
        """Keep the labels of a minibatch; None stands for a missing one.

        A missing minibatch, or one that is not whole or lacks a label, is a `ParameterError`.
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
        """Return the bytes of a minibatch; 0 if unknown."""
        return 0

    def statistics(self) -> Statistics | None:
        """Return the loader's counters; None if it has none."""
        return None

    def findings(self) -> Findings:
        """Return the entropies of all rounds."""
        codes = {}
        for name, kept in self._labels.items():
            found, _ = pd.factorize(np.ravel(kept))  # missing values become -1
            codes[name] = found.reshape(len(kept), -1)
        return Findings(entropies=self._entropies(codes))

    def _entropies(
        self, codes: Mapping[str, NDArray[np.integer]]
    ) -> dict[str | LabelWithin, NDArray[np.float64]]:
        """Return entropies in each round, over labels of shape (n_minibatches, batch_size)."""
        request, found = self._request, dict[str | LabelWithin, NDArray[np.float64]]()
        if codes:
            found |= {name: entropies_of(codes[name]) for name in request.labels}
        if codes and request.given is not None:
            first = request.labels[0]
            within = conditional_entropies_of(codes[first], codes[request.given])
            found[LabelWithin(first, request.given)] = within
        n = request.configuration.minibatches_per_round
        return {label: by_round(bits, n) for label, bits in found.items()}

    def _length(self) -> int:
        """Return how many whole minibatches an epoch has."""
        try:
            return len(self._loader)
        except TypeError:
            sizes = [len(np.asarray(each)) for each in self._tunable.labels.values()]
            if not sizes:
                msg = f"{self._tunable.name} opens a loader without `len()`; give it `labels`"
                raise ParameterError(msg) from None
            return sizes[0] // self._request.ranks.n_total // self._tunable.batch_size


class DatasetSession(Session):
    """cellfeed's own dataset, compared with its plan; see `Session`."""

    is_mapped = False

    def __init__(self, selected: Selected, request: TimingSettings) -> None:
        configuration, collection = request.configuration, selected.collection
        others = configuration.others
        wanted = {"prefetch": request.prefetch, "num_threads": others.get("num_threads")}
        if request.ranks.n_total > 1:
            wanted |= {"rank": request.rank, "world_size": request.ranks.n_total}
        given = {name: value for name, value in wanted.items() if value is not None}
        self._request, self._collection = request, collection
        self.files = collection.files
        if request.n_requests:
            begin_with_requests(request.n_requests)
        self._dataset = request.make_dataset(
            collection,
            request.strategy or selected.blocks(configuration.block_size, others.get("align")),
            batch_size=request.batch_size,
            fetch_factor=configuration.fetch_factor,
            seed=request.seed,
            **given,
        )
        self._dataset.set_epoch(request.first_epoch)
        self.n_rounds = configuration.rounds_per_epoch(self._dataset.plan(epoch=0))
        if self.n_rounds == 0:
            msg = "an epoch has too few whole fetches"
            raise EpochTooShortError(msg)
        if request.cache == "remote":
            self.n_asked = self._dataset.prefetch or REMOTE_PREFETCH
        self.n_threads = self._dataset.num_threads or threads_per_process(
            configuration.fetches_per_round
        )
        self.n_function_threads = self._dataset.transform_threads
        self._came = Delivered(request.all_labels)

    def begin_epoch(self) -> Any:
        """Return the loader of one more epoch, with new workers."""
        return self._dataset.loader(self._request.configuration.num_workers)

    def take(self, minibatch: Minibatch | None) -> None:
        """Keep rows and labels of a minibatch; None stands for a missing one."""
        self._came.take(minibatch)

    def statistics(self) -> Statistics:
        """Return the dataset's counters."""
        return self._dataset.statistics()

    def size_of(self, minibatch: Minibatch) -> int:
        """Return the bytes of a minibatch."""
        parts = [minibatch.rows, *minibatch.obs.values()]
        for each in minibatch.values():
            if each.layout == torch.sparse_csr:
                parts += [each.crow_indices(), each.col_indices(), each.values()]
            else:
                parts.append(each)
        return sum(part.nbytes for part in parts)

    def findings(self) -> Findings:
        """Return the first fault, entropies, and some cells if there is no fault.

        Entropies are of delivered labels, and absent if these are incomplete.
        """
        request, came = self._request, self._came
        plan = self._dataset.plan(epoch=request.first_epoch)
        fault = came.fault(self._collection, request.configuration, plan)
        cells: tuple[DeliveredCell, ...] = ()
        # Transformed values differ from those in the files.
        if came.last is not None and not fault and not self._dataset.transform:
            fault = self._wrong_dtype(came.last)
        if came.last is not None and not fault and not self._dataset.transform:
            cells = sampled_cells(came.last, request.all_labels, seed=request.number)
        return Findings(
            fault=fault,
            n_requests=requests_under_way(),
            cells=cells,
            entropies=self._entropies(came.codes(self._collection)),
        )

    def _wrong_dtype(self, minibatch: Minibatch) -> str:
        """Return how the dtype of X differs from the requested one or the files', in words."""
        asked, name = self._dataset.dtype, next(iter(self._collection.elements))
        wanted = asked.get(name) if isinstance(asked, Mapping) else asked
        expected = np.dtype(wanted or self._collection.dtype).name
        found = str(minibatch[name].dtype).removeprefix("torch.")
        if found == expected or self._dataset.fetch_callback is not None:
            return ""
        source = "the files have" if wanted is None else "the request was for"
        return f"minibatches have {name} of {found} where {source} {expected}"


def _seed(words: tuple[int, ...]) -> None:
    """Seed the global generators, so that each replicate and each rank reads other rows."""
    (word,) = np.random.SeedSequence(words).generate_state(1).tolist()
    random.seed(word)
    np.random.seed(word)  # noqa: NPY002 - other loaders draw from it
    torch.manual_seed(word)
