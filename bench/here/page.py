"""A comparison as one HTML page, which needs neither network nor scripts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
from bench.here.document import Comparison, Entry, Estimate

from cellfeed.console import format_bytes

# Shares of pages and of processors, and seconds of an epoch, from which the page warns.
STRAY, BUSY, SHORT_SECONDS = 0.05, 0.2, 1.0


class Pair(NamedTuple):
    """Another loader, and cellfeed doing the same work."""

    other: Entry
    ours: Entry


def page(comparison: Comparison, *, name: str, sha256: str) -> str:
    """Return the page of a file of this name and digest."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    shown = pairs(comparison)
    most = max((each.cells_per_s.high for pair in shown for each in pair), default=1.0)
    percent: Callable[[float], str] = lambda value: f"{100 * value / most:.2f}%"  # noqa: E731
    text = environment.get_template("page.html.jinja").render(
        it=comparison,
        name=name,
        sha256=sha256,
        title=title(comparison),
        pairs=shown,
        percent=percent,
        interval=interval,
        bytes=format_bytes,
        warnings=warnings(comparison),
        failed=[each for each in comparison.entries if each.failed],
        entries=sorted(comparison.entries, key=lambda each: -_speed(each)),
        rounds="1 round"
        if comparison.settings.rounds == 1
        else f"{comparison.settings.rounds} rounds",
    )
    return text.encode("utf-8", "replace").decode()


def title(comparison: Comparison) -> str:
    """Return which machine it is of."""
    processor = comparison.machine.processor
    cores = f"{processor.usable_cores:g} core{'s' if processor.usable_cores != 1 else ''}"
    return f"{cores} of {processor.model or processor.architecture}"


def pairs(comparison: Comparison) -> list[Pair]:
    """Return the fastest of each other loader for each kind of work, with cellfeed's entry."""
    by_name = {each.name: each for each in comparison.entries}
    fastest: dict[tuple[str, str], Entry] = {}
    for each in comparison.entries:
        if each.speedup is not None and each.peer != "cellfeed":
            kind = (each.section, each.peer)
            fastest[kind] = max(fastest.get(kind, each), each, key=_speed)
    return [Pair(each, by_name[each.compared_with or ""]) for each in fastest.values()]


def _speed(each: Entry) -> float:
    return 0.0 if each.cells_per_s is None else each.cells_per_s.value


def interval(estimate: Estimate | None, form: str = ",.0f") -> str:
    """Return a median with its interval, or nothing."""
    if estimate is None:
        return ""
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def warnings(comparison: Comparison) -> list[str]:
    """Return what a reader should know before the figures."""
    measured = [each for entry in comparison.entries for each in entry.rounds]
    found = []
    if not comparison.complete:
        found.append("Interrupted: not all rounds were measured.")
    if comparison.code.dirty:
        found.append(f"The checkout had changes: {_listed(comparison.code.changed)}.")
    if comparison.code.dirty is None:
        found.append("The commit is unknown: this was no checkout of git.")
    warm = [each for each in measured if each.resident is not None and each.resident > STRAY]
    if warm:
        found.append(f"{len(warm)} of {len(measured)} measurements began with over {STRAY:.0%} of "
                     "the files in the page cache.")  # fmt: skip
    if any(each.resident is None for each in measured):
        found.append("The kernel does not say how much of the files was in the page cache.")
    busy = [each for each in measured if each.busy > BUSY]
    if busy:
        found.append(f"Before {len(busy)} of {len(measured)} measurements, other programs kept "
                     f"over {BUSY:.0%} of the processors busy.")  # fmt: skip
    short = [
        each.name
        for each in comparison.entries
        if any(r.first_minibatch_seconds and r.seconds < SHORT_SECONDS for r in each.rounds)
    ]
    if short:
        found.append(f"The epoch took under {SHORT_SECONDS:g} s for {len(short)} loaders, so that "
                     "its start counts much; --cells 400000 makes it longer.")  # fmt: skip
    return found


def _listed(names: Sequence[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def summary(comparison: Comparison) -> str:
    """Return the pairs as a table in Markdown, and what was not measured."""
    lines = [
        "| loader | its cells/s | cellfeed's cells/s | speedup |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {pair.other.name} | {interval(pair.other.cells_per_s)} "
        f"| {interval(pair.ours.cells_per_s)} | {interval(pair.other.speedup, '.3g')} |"
        for pair in pairs(comparison)
    ]
    failed = [f"- {each.name}: {each.failed}" for each in comparison.entries if each.failed]
    notes = [f"Note: {each}" for each in warnings(comparison)]
    parts = [title(comparison), "\n".join(lines)]
    if failed:
        parts.append("Failed:\n" + "\n".join(failed))
    return "\n\n".join(parts + notes)
