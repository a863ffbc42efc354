"""How long measuring something would take."""

from collections.abc import Mapping, Sequence

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._measure import LEAST_ROUNDS
from cellfeed_tuner._measuring._timing import SLICE_SECONDS
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observation
from cellfeed_tuner._searching._measurements import Measurements

__all__ = ["Durations", "roughly"]

# What a slow disk gives: as long as nothing is known, so large fetches are not begun with.
_UNKNOWN_CELLS_PER_SECOND = 1000.0
# How far a throughput may be mistaken in reckoning what else costs; and draws to reckon from.
_ROUGH_ERROR, _N_DRAWS = 0.1, 32


def roughly(seconds_per_cell: Mapping[Configuration, float]) -> dict[Configuration, Observation]:
    """Return costs that are only good enough to reckon time with."""
    return {each: Observation(cost, _ROUGH_ERROR) for each, cost in seconds_per_cell.items()}


class Durations:
    """Expects how long configurations take, by a cost model of what was measured.

    Parameters
    ----------
    configurations
        What is asked about.
    geometry
        How the collection lies in storage.
    measurements
        What was measured by now.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        geometry: Geometry,
        measurements: Measurements,
    ) -> None:
        self._geometry, self._measurements = geometry, measurements
        self._configurations = tuple(configurations)
        self._believed: dict[Configuration, Observation] = {}
        # Seconds per cell, as they are expected after so many replicates.
        self._expected: dict[Configuration, float] = {}
        self._n_replicates = 0

    def add(self, configurations: Sequence[Configuration]) -> None:
        """Take these in too."""
        self._configurations += tuple(configurations)
        self._expected = {}

    def believe(self, costs: Mapping[Configuration, Observation]) -> None:
        """Take these costs for true where nothing was measured."""
        self._believed = dict(costs)
        self._expected = {}

    def of(self, configuration: Configuration, n_rounds: int = LEAST_ROUNDS) -> float:
        """Return about how many seconds rounds and the first take, by the cost model."""
        cells = (n_rounds + 1) * configuration.minibatches_per_round * self._measurements.batch_size
        if not self._expected or self._n_replicates != self._measurements.n_replicates:
            self._expected, self._n_replicates = (
                self._seconds_per_cell(),
                self._measurements.n_replicates,
            )
        if not self._expected:
            return cells / _UNKNOWN_CELLS_PER_SECOND
        return max(SLICE_SECONDS, cells * self._expected[configuration])

    def _seconds_per_cell(self) -> dict[Configuration, float]:
        """Return what is expected of each configuration; nothing where nothing is known."""
        measurements = self._measurements
        seen = self._believed | roughly(measurements.seconds_per_cell())
        if not seen:
            return {}
        model = CostModel(self._configurations, measurements.batch_size, self._geometry)
        draws = model.draw(seen, _N_DRAWS, np.random.default_rng(measurements.seed))
        medians = np.exp(np.median(draws, axis=0)).tolist()
        return dict(zip(self._configurations, medians, strict=True))

    def of_first_replicate(self, configuration: Configuration) -> float:
        """Return about how many seconds it takes if cells take as long as at best so far."""
        measurements = self._measurements
        speeds = [measurements[each].rough_cells_per_second for each in measurements]
        fastest = max(speeds, default=0.0) or _UNKNOWN_CELLS_PER_SECOND
        cells = 2 * configuration.minibatches_per_round * measurements.batch_size
        return max(SLICE_SECONDS, cells / fastest)
