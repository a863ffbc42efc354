"""Which configurations meet the constraints, which one to recommend, and why.

One ordering of all (`Ordering`), and one rule (`choose`): during a search, in a result and where it
is explained.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log, log2
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import (
    EQUALLY_FAST,
    Estimate,
    is_as_fast,
    is_undecided,
    quotient,
)
from cellfeed_tuner._results import (
    SAME_ENTROPY_SHARE,
    Basis,
    ConfigurationResult,
    Constraints,
    EntropyBits,
    Nearest,
    Rival,
    Status,
    least_share,
)

if TYPE_CHECKING:  # it loads PyTorch
    from cellfeed_tuner._measuring._measurement import Measurement

# Memory sizes that differ by less count as equal. Chosen: memory of one configuration varies by
# this much between runs.
SAME_MEMORY_SHARE = 0.05
# Factor by which the search aims above the needed throughput. Chosen: the lower end of its
# interval must be sufficient.
NEED_MARGIN = 1.05
# Value of twice the memory, as a share of random sampling's entropy. Chosen: of configurations
# that mix alike, the smaller one is proposed.
SHARE_PER_DOUBLING = 2e-5


@dataclass(frozen=True, slots=True)
class Ordering:
    """How fast configurations are, relative to each other, by all that is known.

    Parameters
    ----------
    ratio
        Returns one throughput divided by the other; None if it is unknown.
    n_turns
        Returns in how many turns both were measured.
    """

    ratio: Callable[[Configuration, Configuration], Estimate | None]
    n_turns: Callable[[Configuration, Configuration], int] = lambda *_: 0

    @classmethod
    def of(cls, results: Iterable[ConfigurationResult]) -> Self:
        """Return the ordering in a result, by throughputs relative to the recommended one."""
        relative = {each.configuration: each.relative for each in results if each.relative}

        def ratio(one: Configuration, other: Configuration) -> Estimate | None:
            known = {one, other} <= relative.keys()
            return quotient(relative[one], relative[other]) if known else None

        return cls(ratio)

    def of_timed(self, one: "_Timed", other: "_Timed") -> Estimate:
        """Return one throughput divided by the other, by their own figures if need be."""
        found = self.ratio(one.configuration, other.configuration)
        return quotient(one.speed, other.speed) if found is None else found


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
    def mixing(self) -> float:
        """Entropy as a share of random sampling's, of the label that is mixed least."""
        return self.result.share_of_random


class Choice(NamedTuple):
    """A configuration, what its choice rests on, the reason for it, and what it was compared with.

    ``speed`` is None if nothing was measured. The last two are as in `Recommended`.
    """

    result: ConfigurationResult
    speed: Estimate | None
    reason: str
    basis: Basis
    rivals: tuple[Rival, ...] = ()
    chance_of_faster: float | None = None

    @property
    def configuration(self) -> Configuration:
        """Its settings."""
        return self.result.configuration


def choose(
    results: Sequence[ConfigurationResult], constraints: Constraints, ordering: Ordering
) -> Choice | None:
    """Return the configuration to use of those that were timed, or None if none is feasible.

    Feasible configurations mix well enough and fit in memory. Without a need, the choice is the
    cheapest (memory, then workers) of those within 2 % of the fastest and not significantly slower;
    of several that are as cheap (memory within 5 %), the best mixed. With a need, it is the best
    mixed of those that have the throughput; a need that comes from a training step is dropped if
    nothing meets it.
    """
    timed = _timed(results)
    feasible = [each for each in timed if not any(_shortfalls(each, constraints).values())]
    if not feasible and constraints.step_seconds is not None:
        unmet = replace(constraints, need_cells_per_second=None, step_seconds=None)
        choice = choose(results, unmet, ordering)
        return choice and choice._replace(reason=f"None keeps up with training. {choice.reason}")
    if not feasible:
        return None
    if constraints.need_cells_per_second is None:
        return _cheapest_of_the_fastest(feasible, ordering)
    return _best_mixed(feasible, constraints.need_cells_per_second)


def nearest(results: Sequence[ConfigurationResult], constraints: Constraints) -> Nearest | None:
    """Return the configuration closest to being feasible; None if none can run.

    If nothing was timed, the best mixed of those that mix too little, or else the smallest of those
    that take too much memory.
    """
    below = [each for each in results if each.status == "below entropy floor"]
    unknown = [_Timed(each, Estimate(inf, inf, inf), 0) for each in below]
    missed = list[tuple[float, _Timed, str]]()
    for each in _timed(results) or unknown:
        by = _shortfalls(each, constraints)
        what = " and ".join(problem for problem, shortfall in by.items() if shortfall)
        missed += [(sum(by.values()), each, what)] if what else []
    if missed:
        _, closest, problem = min(missed, key=lambda each: each[0])
        return Nearest(configuration=closest.configuration, problem=problem)
    over = [
        each
        for each in results
        if each.status == "over memory" and constraints.mixes(each.share_of_random)
    ]
    smallest = min(over, key=lambda e: e.configuration.minibatches_in_memory, default=None)
    if smallest is None:
        return None
    problem = f"{smallest.note}, more than the {constraints.memory_bytes / 1e6:,.0f} MB given"
    return Nearest(configuration=smallest.configuration, problem=problem)


def _timed(results: Sequence[ConfigurationResult]) -> list[_Timed]:
    return [
        _Timed(result, result.cells_per_second, result.peak_memory_bytes or 0)
        for result in results
        if result.cells_per_second is not None and result.status != "failed"
    ]


def _shortfalls(each: _Timed, constraints: Constraints) -> dict[str, float]:
    """Return by how much each constraint is missed, as the logarithm of a ratio; 0 if met."""
    floor, label, share = constraints.entropy_floor, each.result.least_mixed, each.mixing
    missed = {
        f"its entropy of {label} is {share:.3f} of random sampling's, "
        f"below the floor of {floor:g}": _log_ratio(least_share(floor), share),
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
    return log(wanted / given) if given > 0 else inf


def _cheapest(alike: Sequence[_Timed]) -> list[_Timed]:
    """Return those with the fewest workers among those within 5 % of the least memory."""
    least = min(each.memory for each in alike)
    lean = [each for each in alike if each.memory <= (1 + SAME_MEMORY_SHARE) * least]
    fewest = min(each.configuration.num_workers for each in lean)
    return [each for each in lean if each.configuration.num_workers == fewest]


def _mixed_alike(feasible: Sequence[_Timed]) -> list[_Timed]:
    """Return those that mix as well as the best mixed, the least memory first."""
    best = max(each.mixing for each in feasible)
    alike = [each for each in feasible if each.mixing >= best - SAME_ENTROPY_SHARE]
    return sorted(alike, key=lambda each: each.memory)


def _cheapest_of_the_fastest(feasible: Sequence[_Timed], ordering: Ordering) -> Choice:
    fastest = max(feasible, key=lambda each: ordering.of_timed(each, feasible[0]).value)
    slower = [each for each in feasible if each is not fastest]
    alike = [each for each in slower if is_as_fast(ordering.of_timed(each, fastest))]
    cheapest = _cheapest([fastest, *alike])
    chosen = _mixed_alike(cheapest)[0]
    ratios = {
        each.configuration: ordering.of_timed(chosen, each)
        for each in feasible
        if each is not chosen
    }
    rivals = tuple(
        Rival(configuration=other, ratio=each, n_turns=n_turns)
        for other, each in sorted(ratios.items(), key=lambda item: item[1].value)
        if (n_turns := ordering.n_turns(chosen.configuration, other))
    )
    n, expects_entropy = len(feasible), chosen.result.is_expected_to_mix
    mixing = ("mix well enough and ", "mixes well enough and ") if expects_entropy else ("", "")
    those = f"the {n} timed configurations that {mixing[0]}fit in memory"
    if n == 1:
        reason = f"The only timed configuration that {mixing[1]}fits in memory."
    elif alike:
        best_mixed = ", and mixes best of those" if len(cheapest) > 1 and expects_entropy else ""
        reason = (
            f"Of {those}, {len(alike) + 1} are {EQUALLY_FAST}; this one takes the least memory and "
            f"fewest workers{best_mixed}."
        )
    else:
        surely = ", though not clearly" if any(map(is_undecided, ratios.values())) else ""
        reason = f"The fastest of {those}{surely}."
    basis: Basis = "compared" if rivals else "timed"
    return Choice(chosen.result, chosen.speed, reason, basis, rivals)


def _best_mixed(feasible: Sequence[_Timed], need: float) -> Choice:
    chosen = min(_cheapest(_mixed_alike(feasible)), key=lambda each: each.memory)
    those = (
        "The only timed configuration that gives"
        if len(feasible) == 1
        else f"The best mixed of the {len(feasible)} timed configurations that give"
    )
    reason = f"{those} the {need:,.0f} cells/s needed."
    return Choice(chosen.result, chosen.speed, reason, "timed")


@dataclass(slots=True, kw_only=True)
class Requirements:
    """Compares configurations with the constraints.

    Parameters
    ----------
    n_cells, row_bytes
        Cells of an epoch of a rank, and the mean size of one in a fetch's buffer.
    entropies
        Returns the entropy of each label by `Configuration.plan_settings`, the first label first.
    is_planned
        Whether entropies are known before anything is measured.
    learn
        Updates entropies with a measurement; returns whether they were unknown before.
    """

    n_cells: int
    row_bytes: float
    batch_size: int
    constraints: Constraints
    entropies: Callable[[tuple[Any, ...]], Mapping[str, EntropyBits]]
    is_planned: bool = True
    learn: "Callable[[Measurement], bool]" = lambda _: False

    def entropies_of(self, configuration: Configuration) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, the first label first."""
        return self.entropies(configuration.plan_settings)

    def mixes(self, configuration: Configuration) -> bool:
        """Return whether every label reaches the entropy floor."""
        return self.constraints.mixes(self.share(configuration))

    def share(self, configuration: Configuration) -> float:
        """Return the entropy of the least mixed label, as a share of random sampling's."""
        found = self.entropies_of(configuration).values()
        return min((each.share_of_random for each in found), default=1.0)

    def excesses(self, configuration: Configuration, peak_memory_bytes: int) -> dict[str, float]:
        """Return by how much a configuration misses each constraint; at most 0 if it meets it."""
        constraints = self.constraints
        return {
            "entropy": least_share(constraints.entropy_floor) - self.share(configuration),
            "memory": float(peak_memory_bytes - constraints.memory_bytes),
        }

    def obstacle(self, configuration: Configuration) -> tuple[Status, str] | None:
        """Return why a configuration cannot run, as a status and a note; None if it can.

        The buffers of all fetches in memory may take no more than the memory given.
        """
        if configuration.block_size > self.n_cells:
            return "too few cells", f"a block has more than the {self.n_cells:,} cells there are"
        needed = configuration.cells_to_time(self.batch_size)
        if needed > self.n_cells:
            return "too few cells", f"whole fetches need {needed:,} cells"
        buffers = configuration.minibatches_in_memory * self.batch_size * self.row_bytes
        if buffers > self.constraints.memory_bytes:
            return "over memory", f"its buffers alone take {buffers / 1e6:,.0f} MB"
        return None

    def worth(self, configuration: Configuration) -> float:
        """Return how well a configuration mixes, slightly less if it takes more memory."""
        share = round(self.share(configuration) / SAME_ENTROPY_SHARE) * SAME_ENTROPY_SHARE
        return share - SHARE_PER_DOUBLING * log2(configuration.minibatches_in_memory)
