"""How long the user's training step takes on a minibatch."""

import numpy as np

from cellfeed import ParameterError
from cellfeed_tuner._constants import STEP_LEAST_ROUNDS, STEP_SECONDS
from cellfeed_tuner._measuring._measure import limit_seconds, measure_with
from cellfeed_tuner._measuring._measuring_process import Runs
from cellfeed_tuner._measuring._timing import Step, TimingRequest
from cellfeed_tuner._request import Request

__all__ = ["step_seconds_of"]

# What does nothing still has a time.
_LEAST_SECONDS = 1e-6


def step_seconds_of(step: Step, process: Runs[TimingRequest], request: Request) -> float:
    """Return the median over rounds of the seconds that a step takes on a minibatch.

    The first round, in which a model is made or compiled, does not count.
    The smallest fetches are read.

    Raises
    ------
    ParameterError
        It fails.
    """
    smallest = min(request.grid, key=lambda each: (each.num_workers, each.minibatches_per_round))
    found = measure_with(
        process,
        TimingRequest(
            configuration=smallest,
            batch_size=request.batch_size,
            labels=(),
            cache=request.cache,
            seed=request.seed,
            least_rounds=STEP_LEAST_ROUNDS,
            seconds=STEP_SECONDS,
            step=step,
            make_dataset=request.make_dataset,
            ranks=request.ranks,
        ),
        limit_seconds=limit_seconds(STEP_SECONDS),
    )
    if not found.round_seconds:
        msg = f"no training step came to its end: {found.failure or 'it takes too long'}"
        raise ParameterError(msg)
    computing = np.subtract(found.round_seconds, found.round_waiting_seconds)
    seconds = float(np.median(computing)) / smallest.minibatches_per_round
    return max(_LEAST_SECONDS, seconds)
