"""Which configuration to recommend, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._planning._constants import SAME_MEMORY_SHARE
from cellfeed_tuner._planning._turns import Turns
from cellfeed_tuner._results._configuration_result import ConfigurationResult
from cellfeed_tuner._results._recommended import (
    SAME_ENTROPY_SHARE,
    SAME_SPEED_SHARE,
    Constraints,
    Nearest,
    Rival,
    least_share,
)

__all__ = ["Choice", "choose", "nearest"]


class _Timed(NamedTuple):
    """A configuration with a throughput."""

    result: ConfigurationResult
    speed: Estimate
    memory: int

    @property
    def num_workers(self) -> int:
        """Its worker processes."""
        return self.result.configuration.num_workers

    @property
    def share(self) -> str:
        """How well it mixes, in words."""
        share = f"{self.mixing:.1%} of random sampling's entropy"
        return f"at least {share} for each label" if self.result.further_labels else share

    @property
    def mixing(self) -> float:
        """Entropy as a share of random sampling's, of the label that is mixed least."""
        return self.result.least_mixed.share_of_random


class Choice(NamedTuple):
    """A configuration, the reason for it in a sentence, and what it was compared with."""

    result: ConfigurationResult
    speed: Estimate
    reason: str
    rivals: tuple[Rival, ...] = ()


def choose(
    results: Sequence[ConfigurationResult],
    constraints: Constraints,
    turns: Turns | None = None,
    costs: Mapping[Configuration, float] | None = None,
) -> Choice | None:
    """Return the configuration to use, or None if none is feasible.

    Feasible configurations mix well enough and fit in memory. Without a need, the choice is the
    cheapest (memory, then workers) of those within 2 % of the fastest and not significantly slower;
    of several that are as cheap (memory within 5 %), the best mixed. With a need, it is the best
    mixed of those that have the throughput; a need that comes from a training step is dropped if
    nothing meets it.

    Parameters
    ----------
    turns
        Interleaved measurements. If feasible configurations took part, the fastest is one of them.
    costs
        Seconds per cell by the cost model and all replicates, which decide which is the fastest;
        if None, the turns do.
    """
    feasible = _feasible(results, constraints)
    if not feasible and constraints.step_seconds is not None:
        return _although_too_slow(results, constraints, turns, costs)
    if not feasible:
        return None
    if constraints.need_cells_per_second is None:
        return _cheapest_of_the_fastest(feasible, turns or Turns(), costs or {})
    return _best_mixed(feasible, constraints.need_cells_per_second)


def nearest(results: Sequence[ConfigurationResult], constraints: Constraints) -> Nearest | None:
    """Return the configuration closest to being feasible, or None if nothing was measured."""
    timed = _timed(results)
    if not timed:
        return None
    closest = min(timed, key=lambda each: sum(_shortfalls(each, constraints).values()))
    problems = [what for what, by in _shortfalls(closest, constraints).items() if by > 0]
    return Nearest(configuration=closest.result.configuration, problem=" and ".join(problems))


def _timed(results: Sequence[ConfigurationResult]) -> list[_Timed]:
    return [
        _Timed(result, result.cells_per_second, result.peak_memory_bytes or 0)
        for result in results
        if result.cells_per_second is not None and result.status != "failed"
    ]


def _feasible(results: Sequence[ConfigurationResult], constraints: Constraints) -> list[_Timed]:
    return [each for each in _timed(results) if not any(_shortfalls(each, constraints).values())]


def _shortfalls(each: _Timed, constraints: Constraints) -> dict[str, float]:
    """Return by how much each constraint is missed, as the logarithm of a ratio; 0 if met."""
    floor, label = constraints.entropy_floor, each.result.least_mixed_label
    missed = {
        f"its entropy{f' of {label}' if label else ''} is {each.mixing:.3f} of random sampling's, "
        f"below the floor of {floor:g}": _log_ratio(least_share(floor), each.mixing),
        f"it takes {each.memory / 1e6:,.0f} MB, more than the {constraints.memory_bytes / 1e6:,.0f}"
        " MB given": _log_ratio(each.memory, constraints.memory_bytes),
    }
    if constraints.need_cells_per_second is not None:
        need = constraints.need_cells_per_second
        missed[
            f"it gives {each.speed.value:,.0f} cells/s (at least {each.speed.low:,.0f}), "
            f"below the {need:,.0f} needed: training would wait for it"
        ] = _log_ratio(need, each.speed.low)
    return missed


def _log_ratio(wanted: float, given: float) -> float:
    if wanted <= given:
        return 0.0
    return math.log(wanted / given) if given > 0 else math.inf


def _as_fast_as_the_fastest(
    finalists: Sequence[_Timed], turns: Turns, costs: Mapping[Configuration, float]
) -> list[_Timed]:
    """Return the fastest, which is the first, and those at most 2 % and not clearly slower."""
    fastest = finalists[0]
    best = fastest.result.configuration

    def is_as_fast(each: _Timed) -> bool:
        own = each.result.configuration
        ratio = turns.ratio(own, best)
        if ratio is None:
            share, may_be = (
                each.speed.value / fastest.speed.value,
                each.speed.overlaps(fastest.speed),
            )
        else:
            share, may_be = ratio.value, ratio.high >= 1
        if costs and not (ratio is not None and ratio.low > 1):
            share = min(share, costs[best] / costs[own])
        return share >= 1 - SAME_SPEED_SHARE and may_be

    return [each for each in finalists if each is fastest or is_as_fast(each)]


def _finalists(
    feasible: Sequence[_Timed], turns: Turns, costs: Mapping[Configuration, float]
) -> list[_Timed]:
    """Return the candidates in order of speed: those measured in turns, if there are any."""
    timed = {each.result.configuration: each for each in feasible}
    if costs:
        raced = [each for each in timed if each in costs and turns.count(each)]
        in_turns = [timed[each] for each in sorted(raced, key=costs.__getitem__)]
    else:
        in_turns = [timed[each] for each in turns.finalists() if each in timed]
    return in_turns or sorted(feasible, key=lambda each: -each.speed.value)


def _rivals(chosen: _Timed, finalists: Sequence[_Timed], turns: Turns) -> tuple[Rival, ...]:
    """Return the comparison of the choice with each other finalist, the fastest first."""
    own = chosen.result.configuration
    others = [each.result.configuration for each in finalists if each is not chosen]
    return tuple(rival for each in others if (rival := turns.rival(own, each)) is not None)


def _cheapest(alike: Sequence[_Timed]) -> list[_Timed]:
    """Return those with the fewest workers among those within 5 % of the least memory."""
    least = min(each.memory for each in alike)
    lean = [each for each in alike if each.memory <= (1 + SAME_MEMORY_SHARE) * least]
    fewest = min(each.num_workers for each in lean)
    return [each for each in lean if each.num_workers == fewest]


def _cheapest_of_the_fastest(
    feasible: Sequence[_Timed], turns: Turns, costs: Mapping[Configuration, float]
) -> Choice:
    finalists = _finalists(feasible, turns, costs)
    alike = _as_fast_as_the_fastest(finalists, turns, costs)
    cheapest = _cheapest(alike)
    chosen = min(_mixed_alike(cheapest), key=lambda each: each.memory)
    rivals = _rivals(chosen, finalists, turns)
    undecided = [each for each in rivals if each.is_undecided]
    those = f"the {len(feasible)} measured configurations that mix well enough and fit in memory"
    if len(feasible) == 1:
        reason = (
            "It is the only measured configuration that mixes well enough and fits in memory, "
            f"with {chosen.share}."
        )
    elif len(alike) > 1:
        best_mixed = "" if len(cheapest) == 1 else ", and mixes best of those as cheap"
        reason = (
            f"{len(alike)} of {those} are equally fast within sampling noise. It is the cheapest "
            f"of these in memory and workers{best_mixed}, with {chosen.share}."
        )
    elif undecided:
        reason = f"It is the fastest of {those}, though not clearly, with {chosen.share}."
    else:
        reason = f"It is the fastest of {those}, with {chosen.share}."
    return Choice(chosen.result, chosen.speed, reason, rivals)


def _although_too_slow(
    results: Sequence[ConfigurationResult],
    constraints: Constraints,
    turns: Turns | None,
    costs: Mapping[Configuration, float] | None,
) -> Choice | None:
    """Return the choice that makes training wait least."""
    unmet = replace(constraints, need_cells_per_second=None, step_seconds=None)
    choice = choose(results, unmet, turns, costs)
    if choice is None:
        return None
    return choice._replace(reason=f"None keeps up with training. {choice.reason}")


def _mixed_alike(feasible: Sequence[_Timed]) -> list[_Timed]:
    """Return those that mix as well as the best mixed."""
    best = max(each.mixing for each in feasible)
    return [each for each in feasible if each.mixing >= best - SAME_ENTROPY_SHARE]


def _best_mixed(feasible: Sequence[_Timed], need: float) -> Choice:
    alike = _mixed_alike(feasible)
    chosen = min(_cheapest(alike), key=lambda each: each.memory)
    those = (
        "It is the only measured configuration that gives"
        if len(feasible) == 1
        else f"It mixes best of the {len(feasible)} measured configurations that give"
    )
    reason = f"{those} the {need:,.0f} cells/s needed, with {chosen.share}."
    return Choice(chosen.result, chosen.speed, reason)
