"""Why one configuration was chosen, and another was not, from a saved result."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, log, log2
from statistics import NormalDist
from typing import Any

import numpy as np

from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import CONFIDENCE, Estimate, interval
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observation
from cellfeed_tuner._planning._recommend import choose
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import STATUS_WORDS, ConfigurationResult
from cellfeed_tuner._results._recommended import SAME_SPEED_SHARE

__all__ = ["Asked", "Why", "why"]

# Standard errors on either side of a mean that its interval covers.
_HALF_WIDTH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which configurations a question is about; None stands for any."""

    block_size: int | None = None
    fetch_factor: int | None = None
    num_workers: int | None = None

    def matches(self, configuration: Configuration) -> bool:
        """Return whether a configuration is one of those."""
        return all(
            wanted is None or wanted == given
            for wanted, given in (
                (self.block_size, configuration.block_size),
                (self.fetch_factor, configuration.fetch_factor),
                (self.num_workers, configuration.num_workers),
            )
        )

    def completed(self, chosen: Configuration | None) -> Configuration | None:
        """Return the configuration with what was left open as it is in the chosen one.

        None if that leaves a size open.
        """
        settings: dict[str, Any] = dict(chosen) if chosen else {"num_workers": 0}
        settings |= {name: each for name, each in asdict(self).items() if each is not None}
        if not {"block_size", "fetch_factor"} <= settings.keys():
            return None
        return Configuration(**settings)

    def __str__(self) -> str:
        named = (
            ("block size", self.block_size),
            ("fetch factor", self.fetch_factor),
            ("workers", self.num_workers),
        )
        return ", ".join(f"{name} {value}" for name, value in named if value is not None)


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
    matching = [each for each in result.configurations if asked.matches(each.configuration)]
    chosen = result.chosen
    outside = None if matching else asked.completed(chosen.configuration if chosen else None)
    about = _best(matching, result) if matching else _nearest(outside or asked, result)
    is_chosen = chosen is not None and about.configuration == chosen.configuration
    return Why(
        asked=asked,
        n_matching=len(matching),
        outside=outside,
        about=about,
        is_chosen=is_chosen,
        speed_ratio=_ratio(about, chosen),
        predicted=_predicted(result, outside or about.configuration),
        homogeneous_bits=None if outside is None else _homogeneous_bits(result, outside),
        reasons=_reasons_for(result) if is_chosen else tuple(_reasons_against(about, result)),
    )


def _best(matching: Sequence[ConfigurationResult], result: AutotuneResult) -> ConfigurationResult:
    """Return what would be chosen of these; if nothing would, what comes nearest to that."""
    choice = choose(matching, result.constraints)
    if choice is not None:
        return choice.result

    def rank(each: ConfigurationResult) -> tuple[bool, float, float]:
        speed = each.cells_per_second.value if each.cells_per_second else 0.0
        share = each.least_mixed.share_of_random
        mixes = result.constraints.mixes(share)
        return mixes, speed if mixes else share, speed

    return max(matching, key=rank)


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


def _ratio(each: ConfigurationResult, chosen: ConfigurationResult | None) -> float | None:
    if chosen is None or chosen.cells_per_second is None or each.cells_per_second is None:
        return None
    return each.cells_per_second.value / chosen.cells_per_second.value


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


def _reasons_for(result: AutotuneResult) -> tuple[str, ...]:
    return (result.recommended.reason,) if result.recommended else ()


def _reasons_against(each: ConfigurationResult, result: AutotuneResult) -> list[str]:
    return [
        *([each.verdict.sentence] if each.verdict and each.verdict.kind == "loader" else []),
        *_mixing(each, result),
        *_memory(each, result),
        *_status(each),
        *_speed(each, result),
    ]


def _mixing(each: ConfigurationResult, result: AutotuneResult) -> list[str]:
    entropy, floor = each.least_mixed, result.constraints.entropy_floor
    if result.constraints.mixes(entropy.share_of_random):
        return []
    share = f"{entropy.share_of_random:.1%} of random sampling's {entropy.random_alike:.3f}"
    bits = f"{entropy.expected.value:.3f} bits"
    return [f"It mixes too little: {bits} are {share}, below the floor of {floor:.0%}."]


def _memory(each: ConfigurationResult, result: AutotuneResult) -> list[str]:
    peak, limit = each.peak_memory_bytes, result.constraints.memory_bytes
    if peak is None or peak <= limit:
        return []
    return [f"It takes {peak / 1e6:,.0f} MB, of {limit / 1e6:,.0f} MB given."]


def _status(each: ConfigurationResult) -> list[str]:
    if each.has_few_rounds:
        return [f"Its throughput comes from {each.n_rounds} rounds only: not enough samples."]
    said = STATUS_WORDS[each.status].sentence
    if not said:
        return []
    is_said = each.status == "too slow" or not each.note
    return [f"{said}." if is_said else f"{said}: {each.note}."]


def _speed(each: ConfigurationResult, result: AutotuneResult) -> list[str]:
    own = each.cells_per_second
    need = result.constraints.need_cells_per_second
    if own is None:
        return []
    if need is not None and own.low < need:
        return [f"It gives {interval(own)} cells/s, which may be below the {need:,.0f} needed."]
    chosen = result.chosen
    if chosen is None:
        return []
    return [_mixes_less(each, chosen) if need is not None else _slower(each, own, chosen)]


def _slower(each: ConfigurationResult, own: Estimate, chosen: ConfigurationResult) -> str:
    theirs = chosen.cells_per_second
    assert theirs is not None  # noqa: S101 - nothing is recommended without
    ratio = own.value / theirs.value
    said = f"{interval(own)} cells/s are {ratio:.2f} times the {interval(theirs)} of the chosen one"
    if ratio >= 1 or (own.overlaps(theirs) and ratio >= 1 - SAME_SPEED_SHARE):
        return f"It is as fast, but {_dearer(each, chosen)}: {said}."
    if own.overlaps(theirs):
        return f"It may be as fast, but was slower when measured: {said}."
    return f"It is slower: {said}."


def _mixes_less(each: ConfigurationResult, chosen: ConfigurationResult) -> str:
    own, theirs = (one.entropy_bits.share_of_random for one in (each, chosen))
    if own >= theirs:
        return f"It is fast enough and mixes as well, but {_dearer(each, chosen)}."
    return (
        f"It is fast enough, but mixes less: {own:.1%} of random sampling's entropy, where the "
        f"chosen one has {theirs:.1%}."
    )


def _dearer(each: ConfigurationResult, chosen: ConfigurationResult) -> str:
    own, theirs = each.peak_memory_bytes or 0, chosen.peak_memory_bytes or 0
    workers = each.configuration.num_workers
    if own > theirs or workers == chosen.configuration.num_workers:
        return f"not cheaper in memory ({own / 1e6:,.0f} MB, the chosen one {theirs / 1e6:,.0f} MB)"
    return f"not cheaper: it takes {workers} worker processes"
