"""What earlier runs are worth to this one: confirmed or dropped, or only an order of probes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, log
from typing import Literal

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    LEAST_ANCHORS,
    MAY_DRIFT,
    MOST_FIRST,
    MUST_NOT_DRIFT,
    N_ANCHORED_RIVALS,
)
from cellfeed_tuner._history._earlier_run import Asked, EarlierRun, Key
from cellfeed_tuner._interval import Estimate, Spread
from cellfeed_tuner._planning._cost_model import Observation
from cellfeed_tuner._planning._space import Space

__all__ = [
    "NOTHING_KNOWN",
    "Comparison",
    "Earlier",
    "EarlierUse",
    "Recollection",
    "compare",
]

EarlierUse = Literal[
    "none",  # nothing was known, or it was to be ignored
    "order",  # something was known, by which only the first probes were chosen
    "confirmed",  # anchors gave what they gave before, so the search was a short one
    "dropped",  # they did not, so it was a full one
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What became of earlier runs' results.

    Parameters
    ----------
    use
        "none": there were none, or they were ignored. "order": they only chose the first probes.
        "confirmed": they still hold, so that the search was a short one. "dropped": they do not.
    sentence
        The same in words.
    """

    use: EarlierUse
    sentence: str


NOTHING_KNOWN = Earlier(
    use="none", sentence="There is no earlier result for these files on this machine."
)
_IGNORED = Earlier(use="none", sentence="Earlier results were ignored, as asked.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recollection:
    """Which earlier runs bear on a search, and what to say of them if none is ``held``.

    One that is ``held`` against fresh measurements is of the same machine, data and versions, and
    looked for all that is looked for now; else one on the same data may choose the first probes.
    """

    held: EarlierRun | None = None
    order: EarlierRun | None = None
    said: Earlier = NOTHING_KNOWN

    @classmethod
    def of(cls, runs: Sequence[EarlierRun], key: Key, asked: Asked) -> "Recollection":
        """Choose among earlier runs, of which the last is the best of its kind."""
        full = [run for run in runs if not run.is_short and run.asked.is_like(asked)]
        for run in reversed(full):
            if run.key == key and run.asked.covers(asked):
                unused = f"What was measured here on {run.date} was of no use."
                return cls(held=run, said=Earlier(use="none", sentence=unused))
        for run in reversed(full):
            if run.key.data == key.data and any(each in asked.space for each in run.trials):
                return cls(order=run, said=_only_an_order(run, key))
        return cls()

    @classmethod
    def ignored(cls) -> "Recollection":
        """Return one that knows nothing, as was asked."""
        return cls(said=_IGNORED)

    def anchors(self, candidates: Sequence[Configuration]) -> list[Configuration]:
        """Return what to measure again: the old choice, a cheap one, and the strongest rivals.

        The cheap one has another number of workers than the choice if there is one: rivals often
        have the same, so that they would not show what has become of the others.
        """
        if self.held is None:
            return []
        ranked = _ranked(self.held, candidates)
        choice, rivals = list(ranked)[:1], list(ranked)[1 : 1 + N_ANCHORED_RIVALS]
        rest = list(ranked)[1 + N_ANCHORED_RIVALS :]
        rest.sort(
            key=lambda each: (
                each.num_workers == choice[0].num_workers,
                ranked[each] * each.minibatches_per_round,
            )
        )
        return [*choice, *rest[:1], *rivals]

    def trials_in(self, space: Space) -> list[Configuration]:
        """Return what of a space was measured by the earlier run that bears on this one."""
        run = self.held or self.order
        return [] if run is None else [each for each in run.trials if each in space]

    def first_probes(self, candidates: Sequence[Configuration]) -> list[Configuration]:
        """Return the first probes that an earlier run suggests."""
        return [] if self.order is None else list(_ranked(self.order, candidates))[:MOST_FIRST]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Whether the earlier run is confirmed or dropped once anchors were measured again.

    ``believed`` has its costs, as this run would have measured them; none if it is dropped.
    """

    earlier: Earlier
    believed: Mapping[Configuration, Observation]


def compare(held: EarlierRun, fresh: Mapping[Configuration, Sequence[float]]) -> Comparison:
    """Hold an earlier run against what was measured again.

    Runs hours apart are not compared: a machine may be busier now, or less. What must be the
    same is how costs relate to each other: each anchor's to the first one's, within the
    intervals of the four figures, but at least 5 % and at most 25 %. ``fresh`` has seconds per
    cell of each replicate, none where one failed; a single replicate is left out.
    """
    failed = next((each for each, replicates in fresh.items() if not replicates), None)
    if failed is not None:
        return _dropped(held, f"{failed} fails now")
    old, spread = held.costs(), Spread.of(fresh.values())
    now = {
        each: spread.estimate(float(np.mean(replicates)), len(replicates))
        for each, replicates in fresh.items()
        if len(replicates) > 1
    }
    if len(now) < LEAST_ANCHORS:
        return _dropped(held, "there was no time to measure enough of it again")
    changed = _changed_ratio(old, now)
    if changed:
        return _dropped(held, changed)
    shift = exp(np.mean([log(now[each].value / old[each].value) for each in now]))
    sentence = (
        f"{len(now)} configurations, measured again, compare with each other as they did on "
        f"{held.date}, so this search was a short one; all figures are from today."
    )
    return Comparison(
        earlier=Earlier(use="confirmed", sentence=sentence),
        believed={
            each: Observation(shift * cost.value, hypot(_half(cost) / 2, MAY_DRIFT))
            for each, cost in old.items()
        },
    )


def _changed_ratio(
    old: Mapping[Configuration, Estimate], now: Mapping[Configuration, Estimate]
) -> str:
    """Return which anchor's cost has changed beside the first one's, empty if none has."""
    first = next(iter(now))
    for each in now:
        then, today = (costs[each].value / costs[first].value for costs in (old, now))
        allowed = sum(hypot(_half(costs[each]), _half(costs[first])) for costs in (old, now))
        if abs(log(today / then)) > min(max(allowed, MAY_DRIFT), MUST_NOT_DRIFT):
            return (
                f"a cell at {each} took {then:.2f} times as long as at {first}, "
                f"and now takes {today:.2f} times as long"
            )
    return ""


def _ranked(run: EarlierRun, candidates: Sequence[Configuration]) -> dict[Configuration, float]:
    """Return seconds per cell of what a run has measured: its choice first, then by speed."""
    wanted = set(candidates)
    costs = {each: cost for each, cost in run.seconds_per_cell().items() if each in wanted}
    return dict(sorted(costs.items(), key=lambda each: (each[0] != run.choice, each[1])))


def _half(cost: Estimate) -> float:
    """Return half the width of an interval, relative to the value."""
    return (cost.high - cost.low) / 2 / cost.value


def _dropped(held: EarlierRun, why: str) -> Comparison:
    sentence = (
        f"What was measured here on {held.date} was dropped, since {why}; "
        "this search was a full one."
    )
    return Comparison(earlier=Earlier(use="dropped", sentence=sentence), believed={})


def _only_an_order(run: EarlierRun, key: Key) -> Earlier:
    if run.key.machine != key.machine:
        whose = f"Another machine's result ({run.key.machine.facts.get('cpu') or 'unknown'})"
    elif run.key.versions != key.versions:
        whose = "A result of this machine with other versions"
    else:
        whose = "A result of this machine that was asked for less"
    return Earlier(
        use="order",
        sentence=(
            f"{whose} of {run.date} decided what was measured first, and nothing else: "
            "this search was a full one."
        ),
    )
