"""A measuring process that answers from a recorded grid."""

from dataclasses import dataclass, field

import numpy as np
from bench.backtest.recorded_grid import RecordedGrid

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._process import Outcome
from cellfeed_tuner._measuring._timing import Findings, Round, Started, TimingRequest

__all__ = ["LOOK_SECONDS", "RecordedProcess"]

LOOK_SECONDS = 20.0
"""Duration of each measurement, by its clock."""

# Relative spread of the rounds within one measurement, and their number.
_ROUND_SPREAD, _N_ROUNDS = 0.03, 4
# Nearly all of a measurement's time goes to what comes before the rounds.
_ROUND_SECONDS = 1e-3


@dataclass(slots=True, kw_only=True)
class RecordedProcess:
    """A machine on which configurations are as fast as recorded.

    Its clock advances by the same amount with each measurement, however long rounds take: the
    replayed search has a given number of measurements. Each measurement has an independent error
    of the same size, so measuring in turns gains nothing here; on a real machine it cancels what
    the machine does at the moment.

    Parameters
    ----------
    grid
        The recording.
    spread
        Relative spread of measurements.
    rng
        The random generator.

    Attributes
    ----------
    now
        Seconds since it began.
    """

    grid: RecordedGrid
    spread: float
    rng: np.random.Generator
    now: float = field(default=0.0, init=False)
    # Seconds per cell; of the fastest, they are a millisecond per minibatch.
    _costs: dict[Configuration, float] = field(init=False)

    def __post_init__(self) -> None:
        speeds = self.grid.cells_per_second()
        unit = _ROUND_SECONDS / self.grid.batch_size * max(speeds.values())
        self._costs = {each: unit / speed for each, speed in speeds.items()}

    def seconds_per_cell(self) -> dict[Configuration, float]:
        """Return the time per cell of each configuration by this clock, without any error."""
        return dict(self._costs)

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        """Return what a process that times a configuration reports; it is never stopped."""
        del limit_seconds
        configuration = request.configuration
        cells = configuration.minibatches_per_round * request.batch_size
        factor = np.exp(self.spread * self.rng.standard_normal())
        noise = factor * np.exp(_ROUND_SPREAD * self.rng.standard_normal(1 + _N_ROUNDS))
        rounds = (cells * self._costs[configuration] * noise).tolist()
        self.now += LOOK_SECONDS
        return Outcome(
            events=(
                Started(0.0, 0.0, 0),
                *(Round(each, number > 0, each, None) for number, each in enumerate(rounds)),
                Findings(),
            ),
            peak_memory_bytes=self.grid.memory_bytes(configuration),
            failure=None,
        )
