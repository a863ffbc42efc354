"""The comparison as tables in Markdown, and their rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rounds
from conversions import Store
from entries import LIMITS, MACHINE, PROCESSES, SECTIONS, STORAGE_NAMES, all_entries
from rounds import Estimate, Result, Results, interval_name, median_with_interval
from targets import Verdict

Row = dict[str, Any]

_NO_BREAK = "\N{NO-BREAK SPACE}"  # keeps an interval on one line of a narrow column


def rows_of(results: Results, stores: dict[str, Store]) -> list[Row]:
    """Return one row per entry, ordered by section."""
    order = sorted(results.values(), key=lambda result: SECTIONS.index(result.entry.section))
    return [_row(result, results, stores) for result in order]


def _row(result: Result, results: Results, stores: dict[str, Store]) -> Row:
    entry = result.entry
    limit = None if entry.is_limit else rounds.lowest_limit(result, results)
    store = stores.get(entry.storage or "")
    converted = [] if store is None else store.runs
    return {
        "section": entry.section,
        "name": entry.name,
        "peer": entry.peer,
        "storage": STORAGE_NAMES[entry.storage],
        "output": entry.output,
        "batch_size": entry.batch_size,
        **_columns("cells_per_s", rounds.speed(result)),
        "rounds": len(result.rounds),
        **_columns("first_minibatch_s", rounds.first_minibatch_seconds(result)),
        "peak_bytes": result.peak_bytes,
        **_columns("conversion_s", median_with_interval([run["seconds"] for run in converted])),
        "store_bytes": converted[-1]["disk_bytes"] if converted else None,
        **_columns("cellfeed_is_times_as_fast", rounds.versus_cellfeed(result, results)),
        **_columns("of_limit", None if limit is None else rounds.ratio(result, limit)),
        "limit": None if limit is None else limit.entry.name,
        **_columns("gb_per_s", rounds.gigabytes_per_second(result)),
        "failed": result.error,
    }


def _columns(name: str, estimate: Estimate | None) -> Row:
    ends = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def markdown(*, run: dict, rows: Sequence[Row], stores: dict[str, Store]) -> str:
    """Return the page: the answer first, then how it was measured, then every row."""
    limits = _by_speed(row for row in rows if row["section"] == MACHINE)
    numbers = {row["name"]: f"L{number}" for number, row in enumerate(limits, start=1)}
    parts = [
        "# cellfeed and other loaders",
        _PURPOSE,
        _circumstances(run),
    ]
    if summary := _summary_table(rows):
        parts += ["## Which is fastest", _SUMMARY, summary]
    parts += _method(run)
    for section in SECTIONS:
        chosen = _by_speed(row for row in rows if row["section"] == section)
        if chosen and section != MACHINE:
            parts += [_heading(section), _loaders_table(chosen, numbers)]
    if limits:
        parts += [_heading(MACHINE), _limits_table(limits, numbers)]
    if stores:
        parts += ["## Conversions", _conversions_table(stores)]
    return "\n\n".join(parts) + "\n"


def targets_markdown(run: dict, verdicts: Sequence[Verdict]) -> str:
    """Return what cellfeed's developers want, and whether it was reached."""
    header = ("target", "result", "compared with", "measured")
    lines = [(each.text, each.verdict, each.against, _brackets(each.ratio)) for each in verdicts]
    parts = ["# Targets", _TARGETS, _circumstances(run), _table(header, lines, n_text=3)]
    return "\n\n".join(parts) + "\n"


def _circumstances(run: dict) -> str:
    return f"{run['collection']}. {run['machine']}. {run['date']}. (`{run['command']}`)"


_PURPOSE = (
    "How fast cellfeed delivers minibatches, compared with other loaders that do the same work and "
    "with the machine's limits."
)
_SUMMARY = (
    "The fastest row of each loader for each kind of work, beside cellfeed's row for the same "
    "files or store, block size and output. Memory is the peak, as measured below."
)
_TARGETS = (
    'Our targets, as ratios. "Within the interval" means that the interval of the measured ratio '
    "contains the target."
)


def _heading(section: str) -> str:
    return f"## {section[0].upper()}{section[1:]}"


def _by_speed(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -(row["cells_per_s"] or 0))


def _method(run: dict) -> list[str]:
    points = {
        "Rounds": f"Figures are medians of {count_rounds(run)}, with the "
        f"{interval_name(run['rounds'])} in brackets. In each round every entry runs once, in "
        "random order, in its own process. Ratios are taken within rounds.",
        "Page cache": f"Cold: {run['cache']}.",
        "Time": "The clock runs from the request for an epoch to its end, or to the end of the "
        f"fetch in which {run['seconds']:g} s have passed. Importing and opening are not timed.",
        "Memory": "The peak of the process and its workers together, in an untimed round that also "
        "compares every delivered cell with the plates.",
        "Limits": "The share is of the lowest of what decompression, disk and memory allow for the "
        "same work. [The machine's limits](#the-machines-limits) lists them as L1, L2 and so on.",
        "Work": f"Every loader also delivers `{run['label']}` of each cell; plain slices do not.",
    }
    listed = "\n".join(f"- **{point}.** {text}" for point, text in points.items())
    return ["## How it was measured", listed]


def caption(run: dict) -> str:
    """Return the caption of the figure of all loaders."""
    return (
        f"{run['collection']}. {run['machine']}. {run['date']}. Minibatches of 64 cells; median of "
        f"{count_rounds(run)} with the {interval_name(run['rounds'])}; page cache {run['cache']}."
    )


def count_rounds(run: dict) -> str:
    """Return the number of rounds in words."""
    return "1 round" if run["rounds"] == 1 else f"{run['rounds']} rounds"


def _summary_table(rows: Sequence[Row]) -> str:
    """Return the fastest row of each other loader in each section beside cellfeed's, or ""."""
    by_name = {row["name"]: row for row in rows}
    versus = {entry.name: entry.versus for entry in all_entries()}
    fastest: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["peer"] in {"cellfeed", LIMITS} or row["section"] == PROCESSES:
            continue
        if row["cellfeed_is_times_as_fast"] is not None:
            best = fastest.setdefault((row["section"], row["peer"]), row)
            if row["cells_per_s"] > best["cells_per_s"]:
                fastest[row["section"], row["peer"]] = row
    header = (
        "work", "loader", "cells/s", "memory", "cellfeed's cells/s", "its memory", "speedup"
    )  # fmt: skip
    pairs = [(row, by_name[versus[row["name"]]]) for row in fastest.values()]
    lines = [
        (
            row["section"], row["name"],
            f"{row['cells_per_s']:,.0f}", _gigabytes(row["peak_bytes"]),
            f"{ours['cells_per_s']:,.0f}", _gigabytes(ours["peak_bytes"]),
            _interval(row, "cellfeed_is_times_as_fast", ".3g"),
        )
        for row, ours in pairs
    ]  # fmt: skip
    return _table(header, lines, n_text=2) if lines else ""


def _loaders_table(rows: Sequence[Row], numbers: Mapping[str, str]) -> str:
    header = (
        "loader", "cells/s", "cellfeed's speedup", "of the limit", "first minibatch, s", "memory"
    )  # fmt: skip
    lines = [
        (
            row["name"], _speed(row), _interval(row, "cellfeed_is_times_as_fast", ".3g"),
            "" if row["of_limit"] is None
            else f"{row['of_limit']:.0%} of{_NO_BREAK}{numbers[row['limit']]}",
            _interval(row, "first_minibatch_s", ".2f"), _gigabytes(row["peak_bytes"]),
        )
        for row in rows
    ]  # fmt: skip
    return _table(header, lines)


def _limits_table(rows: Sequence[Row], numbers: Mapping[str, str]) -> str:
    lines = [
        (numbers[row["name"]], row["name"], _speed(row), _interval(row, "gb_per_s", ".2f"))
        for row in rows
    ]
    return _table(("", "limit", "cells/s", "GB/s moved"), lines, n_text=2)


def _conversions_table(stores: dict[str, Store]) -> str:
    header = ("store", "conversion", "seconds", "runs", "peak memory", "size on disk")
    lines = []
    for store in stores.values():
        times = median_with_interval([run["seconds"] for run in store.runs])
        seconds = f"failed: {store.error}" if store.error else _brackets(times, ".0f", " ")
        memory = max((run["peak_bytes"] for run in store.runs), default=None)
        size = store.runs[-1]["disk_bytes"] if store.runs else None
        what = STORAGE_NAMES[store.conversion.storage], store.conversion.title
        lines.append((*what, seconds, str(len(store.runs)), _gigabytes(memory), _gigabytes(size)))
    return _table(header, lines, n_text=2)


def _speed(row: Row) -> str:
    figure = _interval(row, "cells_per_s", ",.0f")
    if row["failed"] is None:
        return figure
    reason = f"failed: {row['failed']}"
    return f"{figure}; then {reason}" if figure else reason


def _interval(row: Row, name: str, form: str) -> str:
    if row[name] is None:
        return ""
    return _brackets(Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"], 1), form)


def _brackets(estimate: Estimate | None, form: str = ".3g", space: str = _NO_BREAK) -> str:
    if estimate is None:
        return ""
    return f"{estimate.value:{form}} [{estimate.low:{form}},{space}{estimate.high:{form}}]"


def _gigabytes(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / 1e9:.2f} GB"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]], *, n_text: int = 1) -> str:
    """Return a Markdown table whose columns after the first ``n_text`` are aligned right."""
    shown = [[cell.replace("|", "/") for cell in line] for line in lines]
    rules = ["---" if number < n_text else "---:" for number in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rules, *shown])
