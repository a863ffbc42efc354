"""How configurations of a result compare with the recommended one: measured, or predicted."""

from dataclasses import dataclass
from math import exp, isfinite, log
from statistics import NormalDist

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import CONFIDENCE, Estimate
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observations
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results import ConfigurationResult

# Standard errors on either side of a mean that its interval covers.
_HALF_WIDTH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


class Predictions:
    """Throughputs by the cost model, fitted to all that were measured; empty if none were.

    Parameters
    ----------
    result
        The measurements.
    others
        Configurations to predict in addition to those of the result.
    """

    def __init__(self, result: AutotuneResult, *others: Configuration) -> None:
        seen = {
            each.configuration: speed
            for each in result.configurations
            if (speed := each.cells_per_second) is not None
        }
        dataset = result.dataset
        known = dict.fromkeys([*(each.configuration for each in result.configurations), *others])
        self._place = {each: number for number, each in enumerate(known)} if seen else {}
        if seen:
            geometry = Geometry(
                n_cells=dataset.n_visited,
                rows_per_chunk=dataset.visited_per_chunk,
                n_files=len(dataset.paths),
                n_ranks=result.ranks.n_total,
            )
            model = CostModel(list(known), dataset.batch_size, geometry)
            errors = np.array([_relative_error(each) for each in seen.values()])
            self._mean, self._covariance = model.posterior(
                Observations(
                    list(seen),
                    np.array([-log(each.value) for each in seen.values()]),
                    np.diag(errors**2),
                )
            )

    def speed(self, configuration: Configuration) -> Estimate | None:
        """Return cells per second with their 95 % interval; None if unknown."""
        place = self._place.get(configuration)
        if place is None:
            return None
        logarithm, variance = -self._mean[place], max(0.0, self._covariance[place, place])
        low, high = (exp(logarithm + sign * _HALF_WIDTH * variance**0.5) for sign in (-1, 1))
        return Estimate(exp(logarithm), low, high)


def _relative_error(speed: Estimate) -> float:
    """Return the standard error that an interval stands for, or a larger one: it is Student's."""
    return log(speed.high / speed.low) / (2 * _HALF_WIDTH) if isfinite(speed.high) else 1.0


@dataclass(frozen=True, slots=True)
class FloorCost:
    """The fastest configuration below the entropy floor, relative to the recommended one."""

    result: ConfigurationResult
    ratio: Estimate
    is_measured: bool


def floor_cost(result: AutotuneResult) -> FloorCost | None:
    """Return what the entropy floor costs; None if that is unknown or throughput is not sought."""
    chosen, asked = result.recommended, result.constraints
    if chosen is None or asked.need_cells_per_second is not None:
        return None
    found = [
        FloorCost(each, each.relative, is_measured=each.cells_per_second is not None)
        for each in result.configurations
        if each.relative is not None
        and not asked.mixes(each.least_mixed.share_of_random)
        and (each.status == "below entropy floor" or each.cells_per_second is not None)
        and (each.peak_memory_bytes or 0) <= asked.memory_bytes
    ]
    return max(found, key=lambda each: each.ratio.value, default=None)
