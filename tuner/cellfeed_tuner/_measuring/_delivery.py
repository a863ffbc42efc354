"""Whether a loader delivers what its plan says, row by row."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cellfeed import EpochPlan
from cellfeed_tuner._configuration import Configuration

__all__ = ["delivery_fault", "planned_round"]


def planned_round(plan: EpochPlan, configuration: Configuration, number: int) -> NDArray[np.int64]:
    """Return the rows of one round's minibatches, in the order in which they come.

    Each worker reads a fetch of its own, and they take turns in delivering a minibatch.

    Returns
    -------
    Rows, shape (minibatches of a round, batch size).
    """
    n = configuration.fetches_per_round
    by_fetch = plan.delivered_rows(number * n, n).reshape(n, plan.fetch_factor, plan.batch_size)
    return by_fetch.swapaxes(0, 1).reshape(-1, plan.batch_size)


def delivery_fault(
    rows: Sequence[NDArray[np.int64]], configuration: Configuration, plan: EpochPlan
) -> str:
    """Compare minibatches with the plan, and say where they depart from it.

    Parameters
    ----------
    rows
        Rows of each minibatch in the order in which they came: all of an epoch's whole rounds,
        then those of the next epoch, and so on.
    configuration
        What they were read with.
    plan
        The first of these epochs.

    Returns
    -------
    The first minibatch that is not as planned, in words; empty if all are.
    """
    per_round = configuration.minibatches_per_round
    n_rounds = configuration.rounds_per_epoch(plan)
    for start in range(0, len(rows), per_round):
        epochs, number = divmod(start // per_round, n_rounds)
        epoch = replace(plan, epoch=plan.epoch + epochs)
        came = rows[start : start + per_round]
        planned = planned_round(epoch, configuration, number)[: len(came)]
        place = _first_wrong(came, planned)
        if place is not None:
            what = _difference(came[place], planned[place])
            return f"minibatch {number * per_round + place} of epoch {epoch.epoch} {what}"
    return ""


def _first_wrong(came: Sequence[NDArray[np.int64]], planned: NDArray[np.int64]) -> int | None:
    whole = all(each.size == planned.shape[1] for each in came)
    if whole and np.array_equal(np.stack(came), planned):
        return None
    pairs = enumerate(zip(came, planned, strict=True))
    return next(place for place, (one, other) in pairs if not np.array_equal(one, other))


def _difference(came: NDArray[np.int64], planned: NDArray[np.int64]) -> str:
    if came.size != planned.size:
        return f"has {came.size} cells in place of {planned.size}"
    place = int(np.argmax(came != planned))
    return f"has cell {came[place]} where the plan has {planned[place]}"
