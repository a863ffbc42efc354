"""How configurations of a result compare with the recommended one: measured, or predicted."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, hypot, inf, isfinite, log
from statistics import NormalDist

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import CONFIDENCE, Estimate
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observation
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import ConfigurationResult

__all__ = ["FloorCost", "Predictions", "floor_cost", "relative"]

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
            each.configuration: Observation(1 / speed.value, _relative_error(speed))
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
            self._mean, self._covariance = model.posterior(seen)

    def speed(self, configuration: Configuration) -> Estimate | None:
        """Return cells per second with their 95 % interval; None if unknown."""
        return self._estimate({configuration: -1})

    def ratio(self, one: Configuration, other: Configuration) -> Estimate | None:
        """Return the throughput of one configuration divided by that of another."""
        return self._estimate({one: -1, other: 1})

    def _estimate(self, signs: Mapping[Configuration, int]) -> Estimate | None:
        if not signs.keys() <= self._place.keys():
            return None
        direction = np.zeros(len(self._place))
        for configuration, sign in signs.items():
            direction[self._place[configuration]] = sign
        variance = max(0.0, float(direction @ self._covariance @ direction))
        return _estimate(float(direction @ self._mean), variance**0.5)


def _estimate(logarithm: float, error: float) -> Estimate:
    low, high = (exp(logarithm + sign * _HALF_WIDTH * error) for sign in (-1, 1))
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
    predictions, found = Predictions(result), list[FloorCost]()
    for each in result.configurations:
        if asked.mixes(each.least_mixed.share_of_random):
            continue
        ratio = relative(result, each)
        if ratio is None and each.status == "below entropy floor":
            ratio = predictions.ratio(each.configuration, chosen.configuration)
        if ratio is not None and (each.peak_memory_bytes or 0) <= asked.memory_bytes:
            found.append(FloorCost(each, ratio, is_measured=each.cells_per_second is not None))
    return max(found, key=lambda each: each.ratio.value, default=None)


def relative(result: AutotuneResult, each: ConfigurationResult) -> Estimate | None:
    """Return a measured throughput divided by the recommended one; None if either is missing.

    The ratio is that of interleaved measurements, if there are any.
    """
    chosen, speed = result.recommended, each.cells_per_second
    if chosen is None or speed is None:
        return None
    for rival in chosen.rivals:
        if rival.configuration == each.configuration:
            value, low, high = (
                1 / end if end > 0 else inf
                for end in (rival.ratio.value, rival.ratio.high, rival.ratio.low)
            )
            return Estimate(value, low, high)
    error = hypot(_relative_error(speed), _relative_error(chosen.cells_per_second))
    return _estimate(log(speed.value / chosen.cells_per_second.value), error)
