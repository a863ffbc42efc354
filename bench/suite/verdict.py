"""Read asv's results of two commits, and compare them.

Counters can fail; times and memory are reported.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from asv.commands.compare import _is_result_better, unroll_result
from asv.results import iter_results
from asv.util import human_value
from tabulate import tabulate

COUNTER = "track"  # asv's name for the type of a tracked figure

FACTOR = 1.1  # times and memory must differ by more than this
COUNTER_TOLERANCE = 1e-3  # counters, such as bytes per cell, count as equal below this
HEADINGS = ("before", "after", "ratio", "benchmark")
NONE = "-"


@dataclass(frozen=True)
class Figure:
    """A figure of one benchmark with one choice of parameters.

    Attributes
    ----------
    kind
        Type of the benchmark: `COUNTER`, "time" or "peakmemory".
    unit
        Its unit.
    value
        The measured value (the median of times); None if it failed, NaN if it was skipped.
    stats, samples
        asv's statistics of a time, and its samples; None for other types.
    """

    kind: str
    unit: str
    value: float | None
    stats: dict[str, Any] | None = None
    samples: list[float] | None = None

    @property
    def is_measured(self) -> bool:
        """Whether there is a value."""
        return self.value is not None and not math.isnan(self.value)


def read_figures(results: Path) -> dict[str, Figure]:
    """Return the figures of a results folder with one commit in it, by benchmark and parameters."""
    benchmarks = json.loads((results / "benchmarks.json").read_text())
    figures = {}
    for result in iter_results(str(results)):
        for key in result.get_all_result_keys():
            parameters = result.get_result_params(key)
            facts = benchmarks[key]
            parts = (get(key, parameters) for get in (
                result.get_result_value, result.get_result_stats, result.get_result_samples
            ))  # fmt: skip
            for name, *measured in unroll_result(key, parameters, *parts):
                figures[name] = Figure(facts["type"], facts["unit"], *measured)
    return figures


class Change(StrEnum):
    """How a figure changed."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    NEW = "new"
    FAILED = "failed"
    SKIPPED = "skipped"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A figure of two commits.

    Attributes
    ----------
    name
        Benchmark and parameters.
    base, head
        The figure before and after; ``base`` is None if it did not exist.
    """

    name: str
    base: Figure | None
    head: Figure

    @property
    def is_counter(self) -> bool:
        """Whether it is deterministic, so that more than a thousandth of difference counts."""
        return self.head.kind == COUNTER

    @property
    def gates(self) -> bool:
        """Whether this change forbids merging the head."""
        change = self.change
        return change is Change.FAILED or (
            self.is_counter and change in (Change.WORSE, Change.LOST)
        )

    @property
    def change(self) -> Change:
        """How it changed."""
        if self.head.value is None:
            return Change.FAILED
        if self.base is None or self.base.value is None:
            return Change.NEW
        if not self.head.is_measured:
            return Change.LOST if self.base.is_measured else Change.SKIPPED
        if not self.base.is_measured:
            return Change.NEW
        if self._is_better(self.head, self.base):
            return Change.BETTER
        return Change.WORSE if self._is_better(self.base, self.head) else Change.SAME

    def _is_better(self, one: Figure, other: Figure) -> bool:
        if self.is_counter:
            is_same = math.isclose(one.value, other.value, rel_tol=COUNTER_TOLERANCE, abs_tol=1e-9)
            return not is_same and one.value < other.value
        statistics = ((each.stats, each.samples) for each in (one, other))
        return bool(_is_result_better(one.value, other.value, *statistics, FACTOR))


def compare(base: Mapping[str, Figure], head: Mapping[str, Figure]) -> list[Comparison]:
    """Return how each figure changed, for the benchmarks that the head was asked to run."""
    return [
        Comparison(name=name, base=base.get(name), head=figure)
        for name, figure in sorted(head.items())
    ]


def is_accepted(comparisons: Iterable[Comparison]) -> bool:
    """Return whether anything was measured, nothing failed, and no counter got worse."""
    compared = list(comparisons)
    measured = any(each.head.is_measured for each in compared)
    return measured and not any(each.gates for each in compared)


def report(comparisons: Sequence[Comparison]) -> str:
    """Return the verdict as Markdown that reads well as plain text."""
    counters = [each for each in comparisons if each.is_counter]
    others = [each for each in comparisons if not each.is_counter]
    of_counters, of_others = f"of {len(counters)} counters", f"of {len(others)} times and memory"
    by_more = f"by more than {FACTOR - 1:.0%} (times also by asv's rank test): reported only"
    parts = []
    for text, among, change in (
        (f"{of_counters} are worse: the change fails", counters, Change.WORSE),
        (f"{of_counters} are better", counters, Change.BETTER),
        (f"{of_others} figures are worse {by_more}", others, Change.WORSE),
        (f"{of_others} figures are better", others, Change.BETTER),
        ("were measured before and are missing; missing counters fail", comparisons, Change.LOST),
        ("have nothing to compare them with", comparisons, Change.NEW),
        ("were skipped", comparisons, Change.SKIPPED),
        ("FAILED", comparisons, Change.FAILED),
    ):
        rows = [_row(each) for each in among if each.change is change]
        if rows:
            aligned = ("right", "right", "right", "left")
            table = tabulate(rows, HEADINGS, "github", colalign=aligned, disable_numparse=True)
            parts += [f"{len(rows)} {text}:", table]
        elif change is Change.WORSE:
            parts.append(f"0 {text}.")
    return "\n\n".join([*parts, _last_line(comparisons)])


def _row(each: Comparison) -> tuple[str, str, str, str]:
    ratio = NONE
    if each.base is not None and each.base.is_measured and each.head.is_measured:
        ratio = f"{each.head.value / each.base.value:.2f}" if each.base.value > 0 else NONE
    return _shown(each.base), _shown(each.head), ratio, each.name


def _shown(figure: Figure | None) -> str:
    if figure is None or not figure.is_measured:
        return NONE
    if figure.kind == COUNTER:
        return f"{figure.value:,.6g} {figure.unit}"
    return str(human_value(figure.value, figure.unit))


def _last_line(comparisons: Sequence[Comparison]) -> str:
    if is_accepted(comparisons):
        n_slower = sum(each.change is Change.WORSE for each in comparisons)
        advice = f"; {n_slower} times and memory figures are (reported only)" if n_slower else ""
        n_compared = sum(
            each.is_counter and each.change in (Change.SAME, Change.BETTER) for each in comparisons
        )
        return f"VERDICT: PASSED, none of {n_compared} counters is worse{advice}."
    n_failed = sum(each.change is Change.FAILED for each in comparisons)
    n_worse = sum(each.gates for each in comparisons) - n_failed
    if n_failed or n_worse:
        return f"VERDICT: FAILED, {n_worse} counters are worse, {n_failed} figures failed."
    return "VERDICT: FAILED, nothing was measured."
