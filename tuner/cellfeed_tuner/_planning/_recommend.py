"""Which configuration to recommend, and why: the ordering of all, and the rule."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate, quotient
from cellfeed_tuner._planning._posterior import Posterior, TurnsOf
from cellfeed_tuner._results import (
    SAME_ENTROPY_SHARE,
    SAME_SPEED_SHARE,
    Basis,
    ConfigurationResult,
    Constraints,
    Nearest,
    Rival,
    is_undecided,
    least_share,
)

# Memory sizes that differ by less count as equal. Chosen: memory of one configuration varies by
# this much between runs.
SAME_MEMORY_SHARE = 0.05

_FEWEST_TURNS = 2


class Ordering(Protocol):
    """How fast configurations are, relative to each other, by all that is known."""

    def ratio(self, one: Configuration, other: Configuration) -> Estimate | None:
        """Return one throughput divided by the other; None if it is unknown."""
        ...

    def n_turns(self, one: Configuration, other: Configuration) -> int:
        """Return in how many turns both were measured."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredOrdering:
    """The ordering during a search, by all measurements and the cost model."""

    posterior: Posterior
    turns: TurnsOf[Configuration]

    def ratio(self, one: Configuration, other: Configuration) -> Estimate | None:
        """Return one throughput divided by the other; None before any measurement."""
        return self.posterior.ratio(one, other)

    def n_turns(self, one: Configuration, other: Configuration) -> int:
        """Return in how many turns both were measured."""
        return self.turns.count_together(one, other)

    def has_lost(self, configuration: Configuration) -> bool:
        """Return whether one was clearly slower, in turns, than the fastest candidate."""
        candidates = set(self.posterior.candidates)
        finalists = [each for each in self.turns.finalists() if each in candidates]
        costs = self.posterior.seconds_per_cell()
        fastest = min(finalists, key=costs.__getitem__, default=configuration)
        if fastest == configuration or self.n_turns(configuration, fastest) < _FEWEST_TURNS:
            return False
        ratio = self.ratio(configuration, fastest)
        return ratio is not None and ratio.high < 1


@dataclass(frozen=True, slots=True)
class StoredOrdering:
    """The ordering in a result, by the throughputs relative to the recommended configuration."""

    relative: Mapping[Configuration, Estimate]

    @classmethod
    def of(cls, results: Iterable[ConfigurationResult]) -> Self:
        """Return the ordering of the configurations of a result."""
        return cls({each.configuration: each.relative for each in results if each.relative})

    def ratio(self, one: Configuration, other: Configuration) -> Estimate | None:
        """Return one throughput divided by the other; None if it is unknown."""
        if not {one, other} <= self.relative.keys():
            return None
        return quotient(self.relative[one], self.relative[other])

    def n_turns(self, one: Configuration, other: Configuration) -> int:  # noqa: ARG002
        """Return 0: rivals are part of a result."""
        return 0


def rival_of(
    ordering: Ordering, configuration: Configuration, other: Configuration
) -> Rival | None:
    """Return the comparison of a configuration with another; None without enough turns."""
    n_turns, ratio = ordering.n_turns(configuration, other), ordering.ratio(configuration, other)
    if ratio is None or n_turns < _FEWEST_TURNS:
        return None
    return Rival(configuration=other, ratio=ratio, n_turns=n_turns)


class _Timed(NamedTuple):
    """A configuration with a throughput."""

    result: ConfigurationResult
    speed: Estimate
    memory: int

    @property
    def configuration(self) -> Configuration:
        """Its settings."""
        return self.result.configuration

    @property
    def num_workers(self) -> int:
        """Its worker processes."""
        return self.configuration.num_workers

    @property
    def share(self) -> str:
        """How well it mixes, in words."""
        return _share(self.result)

    @property
    def mixing(self) -> float:
        """Entropy as a share of random sampling's, of the label that is mixed least."""
        return self.result.least_mixed.share_of_random


def _share(result: ConfigurationResult) -> str:
    share = f"{result.least_mixed.share_of_random:.1%} of random sampling's entropy"
    return f"at least {share} for each label" if result.further_labels else share


class Choice(NamedTuple):
    """A configuration, what its choice rests on, the reason for it, and what it was compared with.

    ``speed`` is None if nothing was measured.
    """

    result: ConfigurationResult
    speed: Estimate | None
    reason: str
    basis: Basis
    rivals: tuple[Rival, ...] = ()

    @property
    def configuration(self) -> Configuration:
        """Its settings."""
        return self.result.configuration


def choose(
    results: Sequence[ConfigurationResult], constraints: Constraints, ordering: Ordering
) -> Choice | None:
    """Return the configuration to use of those that were measured, or None if none is feasible.

    Feasible configurations mix well enough and fit in memory. Without a need, the choice is the
    cheapest (memory, then workers) of those within 2 % of the fastest and not significantly slower;
    of several that are as cheap (memory within 5 %), the best mixed. With a need, it is the best
    mixed of those that have the throughput; a need that comes from a training step is dropped if
    nothing meets it.
    """
    feasible = _feasible(results, constraints)
    if not feasible and constraints.step_seconds is not None:
        return _although_too_slow(results, constraints, ordering)
    if not feasible:
        return None
    if constraints.need_cells_per_second is None:
        return _cheapest_of_the_fastest(feasible, ordering)
    return _best_mixed(feasible, constraints.need_cells_per_second)


def predicted(result: ConfigurationResult, speed: Estimate | None, *, n_measured: int) -> Choice:
    """Return the choice of a configuration that there was no time to measure, or hardly any."""
    why = f"predicted from {n_measured} measured configuration{'s' * (n_measured != 1)}"
    if not n_measured:
        why = "predicted from how the data are stored; nothing was measured"
    reason = f"It is the likeliest to be the fastest ({why}), with {_share(result)}."
    return Choice(result, speed, reason, "predicted")


def nearest(results: Sequence[ConfigurationResult], constraints: Constraints) -> Nearest | None:
    """Return the configuration closest to being feasible; None if none can run.

    If nothing was measured, the best mixed of those that mix too little.
    """
    missed = [(each, _shortfalls(each, constraints)) for each in _timed(results)]
    missed = [(each, by) for each, by in missed if any(by.values())]
    if not missed:
        below = [each for each in results if each.status == "below entropy floor"]
        timed = [_Timed(each, Estimate(math.inf, math.inf, math.inf), 0) for each in below]
        missed = [(each, _shortfalls(each, constraints)) for each in timed]
    if not missed:
        return None
    closest, shortfalls = min(missed, key=lambda each: sum(each[1].values()))
    problems = [what for what, by in shortfalls.items() if by > 0]
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


def _ratio(one: _Timed, other: _Timed, ordering: Ordering) -> Estimate:
    """Return one throughput divided by the other."""
    found = ordering.ratio(one.configuration, other.configuration)
    return quotient(one.speed, other.speed) if found is None else found


def _as_fast_as_the_fastest(feasible: Sequence[_Timed], ordering: Ordering) -> list[_Timed]:
    """Return the fastest, which is the first, and those at most 2 % and not clearly slower."""
    in_order = sorted(feasible, key=lambda each: -_ratio(each, feasible[0], ordering).value)
    fastest, *others = in_order
    ratios = [(each, _ratio(each, fastest, ordering)) for each in others]
    alike = [e for e, r in ratios if r.value >= 1 - SAME_SPEED_SHARE and r.high >= 1]
    return [fastest, *alike]


def _cheapest(alike: Sequence[_Timed]) -> list[_Timed]:
    """Return those with the fewest workers among those within 5 % of the least memory."""
    least = min(each.memory for each in alike)
    lean = [each for each in alike if each.memory <= (1 + SAME_MEMORY_SHARE) * least]
    fewest = min(each.num_workers for each in lean)
    return [each for each in lean if each.num_workers == fewest]


def _cheapest_of_the_fastest(feasible: Sequence[_Timed], ordering: Ordering) -> Choice:
    alike = _as_fast_as_the_fastest(feasible, ordering)
    cheapest = _cheapest(alike)
    chosen = min(_mixed_alike(cheapest), key=lambda each: each.memory)
    others = [each for each in feasible if each is not chosen]
    others.sort(key=lambda each: -_ratio(each, chosen, ordering).value)
    compared = [rival_of(ordering, chosen.configuration, each.configuration) for each in others]
    rivals = tuple(each for each in compared if each is not None)
    undecided = [each for each in others if is_undecided(_ratio(chosen, each, ordering))]
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
    basis: Basis = "compared" if rivals else "measured"
    return Choice(chosen.result, chosen.speed, reason, basis, rivals)


def _although_too_slow(
    results: Sequence[ConfigurationResult],
    constraints: Constraints,
    ordering: Ordering,
) -> Choice | None:
    """Return the choice that makes training wait least."""
    unmet = replace(constraints, need_cells_per_second=None, step_seconds=None)
    choice = choose(results, unmet, ordering)
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
    return Choice(chosen.result, chosen.speed, reason, "measured")
