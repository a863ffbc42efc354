"""How long the user's training step takes on a minibatch."""

import numpy as np

from cellfeed import ParameterError
from cellfeed_tuner._measuring._measure import limit_seconds, measure_with
from cellfeed_tuner._measuring._measuring_process import Runs
from cellfeed_tuner._measuring._timing import MakeDataset, Step, TimingRequest
from cellfeed_tuner._request import Request

__all__ = ["step_seconds_of"]

_SECONDS, _LEAST_ROUNDS = 1.0, 4
# What does nothing still has a time.
_LEAST_SECONDS = 1e-6


def step_seconds_of(
    step: Step, process: Runs[TimingRequest], request: Request, make_dataset: MakeDataset
) -> float:
    """Return the median over rounds of the seconds that a step takes on a minibatch.

    The first round, in which a model is made or compiled, does not count.

    Parameters
    ----------
    step
        Called with each minibatch.
    process
        Where it is called.
    request
        What minibatches are of: the smallest fetches are read.
    make_dataset
        As in `autotune`.

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
            least_rounds=_LEAST_ROUNDS,
            seconds=_SECONDS,
            step=step,
            make_dataset=make_dataset,
            ranks=request.ranks,
        ),
        limit_seconds=limit_seconds(_SECONDS),
    )
    if not found.round_seconds:
        msg = f"no training step came to its end: {found.failure or 'it takes too long'}"
        raise ParameterError(msg)
    computing = np.subtract(found.round_seconds, found.round_waiting_seconds)
    seconds = float(np.median(computing)) / smallest.minibatches_per_round
    return max(_LEAST_SECONDS, seconds)
