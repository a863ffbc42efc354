"""All that a search measures, slice of time by slice of time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cellfeed import CellDataset, Collection
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._comparison import compare_with_files
from cellfeed_tuner._measuring._labels import LabelWithin
from cellfeed_tuner._measuring._measure import (
    FEWEST_ROUNDS,
    LEAST_ROUNDS,
    Measurement,
    measure_with,
    pooled,
)
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess
from cellfeed_tuner._measuring._sampled_cells import DeliveredCell
from cellfeed_tuner._measuring._timing import SLICE_SECONDS, MakeDataset, TimingRequest
from cellfeed_tuner._progress import Progress, silent
from cellfeed_tuner._searching._time_budget import TimeBudget

__all__ = ["Measurements"]


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Times configurations, and keeps what came out.

    Parameters
    ----------
    process
        Where configurations run.
    labels, batch_size, cache, seed
        What is measured; see `autotune`.
    given
        What the first label is to be mixed within, or None.
    budget
        What there is time for: it says when a measurement is stopped.
    on_progress
        Told how much of the budget is spent.
    make_dataset
        Makes the data set that is measured; see `autotune`.

    Attributes
    ----------
    faults
        Configurations whose minibatches were not those of the plan or of the files, and how they
        were not.
    sampled
        Cells that came out of each configuration when it was looked at last, the last one at the
        end.
    n_looks
        How often anything was looked at.
    """

    process: MeasuringProcess[Collection]
    labels: Sequence[str]
    batch_size: int
    cache: CacheState
    seed: int
    budget: TimeBudget
    given: str | None = None
    on_progress: Progress = silent
    make_dataset: MakeDataset = CellDataset
    faults: dict[Configuration, str] = field(default_factory=dict, init=False)
    sampled: dict[Configuration, tuple[DeliveredCell, ...]] = field(
        default_factory=dict, init=False
    )
    n_looks: int = field(default=0, init=False)
    _slices: dict[Configuration, list[Measurement]] = field(default_factory=dict, init=False)

    def __contains__(self, configuration: Configuration) -> bool:
        return configuration in self._slices

    def __iter__(self) -> Iterator[Configuration]:
        """Iterate over what was looked at, in the order of first looks."""
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, configuration: Configuration) -> Measurement:
        """Return all that was measured of a configuration as one measurement."""
        return pooled(self._slices[configuration])

    def with_throughput(self) -> dict[Configuration, Measurement]:
        """Return what was measured of each configuration that has a throughput."""
        found = {each: self[each] for each in self}
        return {each: one for each, one in found.items() if one.cells_per_second is not None}

    def entropy_within(self, configuration: Configuration) -> Estimate | None:
        """Return the entropy of the first label within the other; None where there is none."""
        if self.given is None or configuration not in self:
            return None
        return self[configuration].entropy_bits.get(LabelWithin(self.labels[0], self.given))

    def look(self, configuration: Configuration, least_rounds: int) -> None:
        """Measure a configuration for a slice of time, and keep what comes out."""
        new = self.timed(configuration, least_rounds=least_rounds)
        self._slices.setdefault(configuration, []).append(new)
        self.n_looks += 1

    def timed(
        self,
        configuration: Configuration,
        *,
        seconds: float = SLICE_SECONDS,
        least_rounds: int = LEAST_ROUNDS,
        step_seconds: float = 0.0,
        limit_seconds: float | None = None,
    ) -> Measurement:
        """Measure a configuration, apart from what is known of it."""
        seconds_in_all = self.budget.seconds
        self.on_progress("throughput", min(self.budget.spent, seconds_in_all), seconds_in_all)
        found = measure_with(
            self.process,
            TimingRequest(
                configuration=configuration,
                batch_size=self.batch_size,
                labels=self.labels,
                given=self.given,
                cache=self.cache,
                seed=self.seed,
                least_rounds=least_rounds,
                seconds=seconds,
                number=self.n_looks,
                step_seconds=step_seconds,
                make_dataset=self.make_dataset,
            ),
            limit_seconds=limit_seconds or self.budget.limit_seconds,
        )
        if found.delivery_fault:
            self.faults.setdefault(configuration, found.delivery_fault)
        if found.sampled:
            self.sampled.pop(configuration, None)
            self.sampled[configuration] = found.sampled
        return replace(found, sampled=())

    def compare_with_files(self, collection: Collection) -> int:
        """Hold cells that came out against the files, note faults, and return how many they are."""
        found = compare_with_files(collection, self.sampled)
        self.faults = {**self.faults, **found.faults, **self.faults}
        return found.n_cells

    def least_rounds(self, configuration: Configuration) -> int:
        """Return how many rounds the next look needs.

        One for a first look, then what a throughput needs, then what one relies on.
        """
        slices = self._slices.get(configuration, [])
        n_rounds = sum(len(each.round_seconds) for each in slices)
        missing = (number - n_rounds for number in (FEWEST_ROUNDS, LEAST_ROUNDS))
        return next((each for each in missing if each > 0), 1) if slices else 1

    def looks(self, configuration: Configuration) -> list[list[float]]:
        """Return seconds per cell, a few samples for each slice of time."""
        cells = configuration.minibatches_per_round * self.batch_size
        slices = [each.round_seconds for each in self._slices[configuration]]
        looks = [
            [
                float(group.mean()) / cells
                for group in np.array_split(rounds, min(len(rounds), FEWEST_ROUNDS))
            ]
            for rounds in slices
            if rounds
        ]
        if looks:
            return looks
        first = self._slices[configuration][0]
        if first.failure:
            return []
        # Where no round came in time, one takes at least as long as was waited for it.
        return [[(first.first_round_seconds or self.budget.limit_seconds) / cells]]

    def seconds_per_cell(self) -> Mapping[Configuration, float]:
        """Return the mean of all looks, of each configuration that did not fail."""
        return {
            each: float(np.mean(np.concatenate(looks)))
            for each in self
            if (looks := self.looks(each))
        }
