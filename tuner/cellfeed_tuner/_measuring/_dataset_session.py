"""cellfeed's own data set in the measuring process, held against its plan."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cellfeed import Minibatch, Statistics
from cellfeed.machine import threads_per_process
from cellfeed.stages import begin_with_requests, requests_under_way
from cellfeed_tuner._defaults import REMOTE_PREFETCH
from cellfeed_tuner._entropy._conditional_entropy import conditional_entropies_of
from cellfeed_tuner._entropy._minibatch_entropy import entropies_of
from cellfeed_tuner._measuring._delivery import Delivered
from cellfeed_tuner._measuring._events import Delivery, Entropies, Requests, Sampled, by_round
from cellfeed_tuner._measuring._labels import LabelWithin
from cellfeed_tuner._measuring._sampled_cells import sampled_cells
from cellfeed_tuner._measuring._selected import Selected
from cellfeed_tuner._measuring._session import EpochTooShortError, Session
from cellfeed_tuner._measuring._timing_settings import TimingSettings

__all__ = ["DatasetSession"]


class DatasetSession(Session):
    """A data set with the settings of a request; see `Session`.

    Raises
    ------
    EpochTooShortError
        An epoch has too few whole fetches.
    """

    is_mapped = False

    def __init__(self, selected: Selected, request: TimingSettings) -> None:
        configuration, collection = request.configuration, selected.collection
        others = configuration.others
        asked = {"prefetch": request.prefetch, "num_threads": others.get("num_threads")}
        if request.ranks.n_total > 1:
            asked |= {"rank": request.rank, "world_size": request.ranks.n_total}
        given = {name: value for name, value in asked.items() if value is not None}
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
        if self.n_rounds == 0:  # nothing would ever come
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
        """Return the loader of one more epoch, with workers of its own."""
        return self._dataset.loader(self._request.configuration.num_workers)

    def take(self, minibatch: Minibatch | None) -> None:
        """Keep what is needed of a minibatch; None stands for one that did not come."""
        self._came.take(minibatch)

    def size_of(self, minibatch: Minibatch) -> int:
        """Return the bytes of a minibatch."""
        parts = [minibatch.rows, *minibatch.obs.values()]
        for each in minibatch.values():
            if each.layout == torch.sparse_csr:
                parts += [each.crow_indices(), each.col_indices(), each.values()]
            else:
                parts.append(each)
        return sum(part.nbytes for part in parts)

    def statistics(self) -> Statistics:
        """Return what the data set has counted so far."""
        return self._dataset.statistics()

    def findings(self) -> Iterator[object]:
        """Yield `Requests` and `Delivery`, then, if all is well, `Sampled`, and `Entropies`.

        These as minibatches have the labels, if they are whole.
        """
        request, came = self._request, self._came
        yield Requests(requests_under_way())
        plan = self._dataset.plan(epoch=request.first_epoch)
        fault = came.fault(self._collection, request.configuration, plan)
        yield Delivery(fault)
        # Values that were transformed are not those of the files.
        if came.last is not None and not fault and not self._dataset.transform:
            yield Sampled(sampled_cells(came.last, request.all_labels, seed=request.number))
        yield from self._entropies(came.codes(self._collection))

    def _entropies(self, codes: Mapping[str, NDArray[np.integer]]) -> Iterator[Entropies]:
        """Yield entropies over the labels of minibatches, shape (n_minibatches, batch_size)."""
        request = self._request
        per_round = request.configuration.minibatches_per_round
        if not codes:
            return
        for label in request.labels:
            yield Entropies(label, by_round(entropies_of(codes[label]), per_round))
        if request.given is not None:
            first = request.labels[0]
            bits = conditional_entropies_of(codes[first], codes[request.given])
            yield Entropies(LabelWithin(first, request.given), by_round(bits, per_round))
