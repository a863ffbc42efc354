"""What answers as a measuring process would, from a recorded grid."""

from dataclasses import dataclass, field

import numpy as np
from bench.backtest.recorded_grid import RecordedGrid

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._measuring_process import Outcome
from cellfeed_tuner._measuring._timing import Delivery, Round, Started, TimingRequest

__all__ = ["RecordedProcess"]

# What comes before the first minibatch: a process, and each of its workers.
_START_SECONDS, _WORKER_SECONDS = 0.15, 0.15
# Relative spread of the rounds of one replicate.
_ROUND_SPREAD = 0.03


@dataclass(slots=True, kw_only=True)
class RecordedProcess:
    """A machine on which configurations are as fast as they were recorded.

    Time is that of its clock, which goes on with each request by as much as it would have taken.
    Each replicate of a configuration is off by an error of its own, all alike in size: nothing is
    gained by measuring in turns, which on a real machine cancels what the moment does.

    Parameters
    ----------
    grid
        What was recorded.
    spread
        Relative spread of replicates.
    rng
        Where chance comes from.

    Attributes
    ----------
    now
        Seconds since it began.
    """

    grid: RecordedGrid
    spread: float
    rng: np.random.Generator
    now: float = field(default=0.0, init=False)
    _speeds: dict[Configuration, float] = field(init=False)

    def __post_init__(self) -> None:
        self._speeds = self.grid.cells_per_second()

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        """Return what a process reports that times a configuration."""
        configuration = request.configuration
        cells = configuration.minibatches_per_round * request.batch_size
        speed = self._speeds[configuration]
        factor = np.exp(self.spread * self.rng.standard_normal())
        spent = _START_SECONDS + _WORKER_SECONDS * configuration.num_workers
        events = list[object]([Started(spent, 0.0, 0)])
        for number in range(1 + request.most_rounds):
            own = np.exp(_ROUND_SPREAD * self.rng.standard_normal())
            seconds = float(cells / speed * factor * own)
            if spent + seconds > limit_seconds:
                spent = limit_seconds
                break
            spent += seconds
            events.append(Round(seconds, number > 0, seconds, None))
            if spent > request.seconds and number >= request.least_rounds:
                break
        self.now += spent
        return Outcome(
            events=(*events, Delivery("")),
            peak_memory_bytes=self.grid.memory_bytes(configuration),
            failure=None,
        )
