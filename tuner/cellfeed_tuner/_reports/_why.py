"""Why one configuration was chosen, and another was not, from a saved result."""

from dataclasses import asdict, dataclass
from math import isfinite, log, log2
from statistics import NormalDist
from typing import Any

import numpy as np

from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import CONFIDENCE, Estimate
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observation
from cellfeed_tuner._planning._recommend import choose
from cellfeed_tuner._reports._words import in_words
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import ConfigurationResult

__all__ = ["Asked", "Why", "why"]

# Standard errors on either side of a mean that its interval covers.
_HALF_WIDTH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which configurations a question is about; None stands for any."""

    block_size: int | None = None
    fetch_factor: int | None = None
    num_workers: int | None = None

    @property
    def settings(self) -> dict[str, int]:
        """What was asked for, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def completed(self, chosen: Configuration | None) -> Configuration | None:
        """Return it with what was left open as it is in the chosen one; None if a size is open."""
        settings: dict[str, Any] = dict(chosen) if chosen else {"num_workers": 0}
        settings |= self.settings
        if not {"block_size", "fetch_factor"} <= settings.keys():
            return None
        return Configuration(**settings)

    def __str__(self) -> str:
        named = {name.removeprefix("num_"): value for name, value in self.settings.items()}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What is known of the configurations that a question is about.

    Parameters
    ----------
    asked
        The question.
    n_matching
        Configurations of the grid that it is about; 0 if it lies outside of the grid.
    outside
        If it lies outside of the grid, what was asked about, with the recommended one's settings
        where nothing was said; None else, or if that leaves a size open.
    about
        The best of them; if there is none, what comes nearest in block size and fetch factor
        together, of what was measured.
    is_chosen
        Whether that is the recommended one.
    speed_ratio
        Its throughput as a share of the chosen one's, both as searched; None without both.
    predicted
        What the cost model, fitted to all that was measured, gives for it (or for what was
        asked, if that is outside of the grid): cells per second; None if nothing was measured.
    homogeneous_bits
        For what is outside of the grid: exact expectation of the entropy if every block held
        one label; None if it is in the grid, or it is not known how often labels are drawn.
    reasons
        What speaks against it, or for it if it is the chosen one, the weightiest first.
    """

    asked: Asked
    n_matching: int
    outside: Configuration | None
    about: ConfigurationResult
    is_chosen: bool
    speed_ratio: float | None
    predicted: Estimate | None
    homogeneous_bits: float | None
    reasons: tuple[str, ...]


def why(result: AutotuneResult, asked: Asked) -> Why:
    """Say why something was not chosen, or was."""
    chosen, outside = result.chosen, None
    matching = [
        each
        for each in result.configurations
        if asked.settings.items() <= each.configuration.items()
    ]
    if matching:
        choice = choose(matching, result.constraints)
        about = choice.result if choice else max(matching, key=lambda each: _rank(each, result))
    else:
        outside = asked.completed(chosen.configuration if chosen else None)
        about = _nearest(outside or asked, result)
    speeds = [each.cells_per_second for each in (about, chosen) if each and each.cells_per_second]
    is_chosen = about == chosen
    reasons = in_words("against", result, about)
    if is_chosen and result.recommended is not None:
        reasons = [result.recommended.reason]
    return Why(
        asked=asked,
        n_matching=len(matching),
        outside=outside,
        about=about,
        is_chosen=is_chosen,
        speed_ratio=speeds[0].value / speeds[1].value if len(speeds) > 1 else None,
        predicted=_predicted(result, outside or about.configuration),
        homogeneous_bits=None if outside is None else _homogeneous_bits(result, outside),
        reasons=tuple(reasons),
    )


def _rank(each: ConfigurationResult, result: AutotuneResult) -> tuple[bool, float, float]:
    """Return what is larger of what comes nearer to being chosen, where nothing would be."""
    speed = each.cells_per_second.value if each.cells_per_second else 0.0
    share = each.least_mixed.share_of_random
    mixes = result.constraints.mixes(share)
    return mixes, speed if mixes else share, speed


def _nearest(wanted: Asked | Configuration, result: AutotuneResult) -> ConfigurationResult:
    """Return what is the fewest doublings away in both sizes together, of what was measured.

    Of several, the one with the most similar number of workers; of the whole grid if nothing was
    measured.
    """

    def apart(each: ConfigurationResult) -> tuple[float, float]:
        settings = each.configuration
        sizes = (
            (wanted.block_size, settings.block_size),
            (wanted.fetch_factor, settings.fetch_factor),
        )
        doublings = sum(abs(log2(size / given)) for size, given in sizes if size is not None)
        return doublings, abs((wanted.num_workers or 0) - settings.num_workers)

    measured = [each for each in result.configurations if each.cells_per_second is not None]
    return min(measured or result.configurations, key=apart)


def _predicted(result: AutotuneResult, configuration: Configuration) -> Estimate | None:
    """Return what the cost model makes of all measured throughputs."""
    seen = {
        each.configuration: Observation(1 / speed.value, _relative_error(speed))
        for each in result.configurations
        if (speed := each.cells_per_second) is not None
    }
    if not seen:
        return None
    dataset = result.dataset
    known = list(
        dict.fromkeys([*(each.configuration for each in result.configurations), configuration])
    )
    geometry = Geometry(
        n_cells=dataset.n_visited,
        rows_per_chunk=dataset.visited_per_chunk,
        n_files=len(dataset.paths),
        n_ranks=result.ranks.n_total,
    )
    mean, covariance = CostModel(known, dataset.batch_size, geometry).posterior(seen)
    place = known.index(configuration)
    half = _HALF_WIDTH * covariance[place, place] ** 0.5
    low, middle, high = np.exp(-mean[place] + half * np.array([-1.0, 0.0, 1.0])).tolist()
    return Estimate(middle, low, high)


def _relative_error(speed: Estimate) -> float:
    """Return what an interval takes for the standard error, or more: its ends are Student's."""
    return log(speed.high / speed.low) / (2 * _HALF_WIDTH) if isfinite(speed.high) else 1.0


def _homogeneous_bits(result: AutotuneResult, configuration: Configuration) -> float | None:
    counts, batch_size = result.dataset.label_counts, result.dataset.batch_size
    if not counts or result.strategy is not None:
        return None
    block_size, fetch_factor = configuration.block_size, configuration.fetch_factor
    return theory.expected_entropy_bits(counts, batch_size, block_size, fetch_factor)
