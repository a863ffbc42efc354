"""The comparison as tables: markdown for people, CSV and JSON for programs."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import figures
from conversions import Store
from entries import MACHINE, SECTIONS, STORAGE_NAMES
from figures import Results
from intervals import Estimate, interval_name, median_with_interval
from rounds import Result
from targets import Verdict

Row = dict[str, Any]


def rows_of(results: Results, stores: dict[str, Store]) -> list[Row]:
    """Return one row per entry, in the order of sections."""
    order = sorted(results.values(), key=lambda result: SECTIONS.index(result.entry.section))
    return [_row(result, results, stores) for result in order]


def _row(result: Result, results: Results, stores: dict[str, Store]) -> Row:
    entry = result.entry
    limit = None if entry.is_limit else figures.lowest_limit(result, results)
    store = stores.get(entry.storage or "")
    converted = [] if store is None else store.runs
    return {
        "section": entry.section,
        "name": entry.name,
        "peer": entry.peer,
        "storage": STORAGE_NAMES[entry.storage],
        "output": entry.output,
        "batch_size": entry.batch_size,
        **_columns("cells_per_s", figures.speed(result)),
        "rounds": len(result.rounds),
        **_columns("first_minibatch_s", figures.first_minibatch_seconds(result)),
        "peak_bytes": result.peak_bytes,
        **_columns("conversion_s", median_with_interval([run["seconds"] for run in converted])),
        "store_bytes": converted[-1]["disk_bytes"] if converted else None,
        **_columns("cellfeed_is_times_as_fast", figures.versus_cellfeed(result, results)),
        **_columns("of_limit", None if limit is None else figures.ratio(result, limit)),
        "limit": None if limit is None else limit.entry.name,
        **_columns("gb_per_s", figures.gigabytes_per_second(result)),
        "failed": result.error,
    }


def _columns(name: str, estimate: Estimate | None) -> Row:
    ends = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write one line per entry."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(
    path: Path,
    *,
    run: dict,
    rows: Sequence[Row],
    results: Results,
    stores: dict[str, Store],
    verdicts: Sequence[Verdict],
) -> None:
    """Write everything that was measured, round by round."""
    document = {
        "run": run,
        "rows": rows,
        "results": [result.to_json() for result in results.values()],
        "conversions": {
            store.conversion.title: {"runs": store.runs, "failed": store.error}
            for store in stores.values()
        },
        "targets": [asdict(verdict) for verdict in verdicts],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def markdown(
    *, run: dict, rows: Sequence[Row], stores: dict[str, Store], verdicts: Sequence[Verdict]
) -> str:
    """Return the tables as people read them."""
    parts = ["# cellfeed and other loaders", *_introduction(run)]
    for section in SECTIONS:
        chosen = [row for row in rows if row["section"] == section]
        if chosen:
            chosen.sort(key=lambda row: -(row["cells_per_s"] or 0))
            table = _limits_table(chosen) if section == MACHINE else _loaders_table(chosen)
            parts += [f"## {section[0].upper()}{section[1:]}", table]
    if stores:
        parts += ["## Conversions", _conversions_table(stores)]
    return "\n\n".join([*parts, "## Targets", _targets_table(verdicts)]) + "\n"


def _introduction(run: dict) -> list[str]:
    how = (
        f"Median of {count_rounds(run)}, in brackets the {interval_name(run['rounds'])}. In each "
        "round every entry runs once, in random order, in a process of its own, on pages that the "
        f"kernel was made to forget ({run['cache']}). The clock runs from asking for an epoch to "
        f"its end, or to the end of the fetch in which {run['seconds']:g} s are over; importing "
        "and opening are not timed. Memory is the most that processes and workers had together, "
        "in a round of its own that is not timed, and in which every cell was held against the "
        "plates. The limit is the lowest of what decompression, disk and memory allow for the "
        f"same work. Ratios are of the same rounds. Every loader delivers `{run['label']}` of each "
        "cell too, slices by hand do not."
    )
    return [f"{run['collection']}. {run['machine']}. {run['date']}.", how]


def caption(run: dict) -> str:
    """Return what a picture of the loaders has below it."""
    return (
        f"{run['collection']}. {run['machine']}. {run['date']}. Minibatches of 64 cells; median of "
        f"{count_rounds(run)} with the {interval_name(run['rounds'])}; page cache {run['cache']}."
    )


def count_rounds(run: dict) -> str:
    """Say how many rounds there were."""
    return "1 round" if run["rounds"] == 1 else f"{run['rounds']} rounds"


def _loaders_table(rows: Sequence[Row]) -> str:
    lines = [
        (
            row["name"],
            _failed_or(row, _interval(row, "cells_per_s", ",.0f")),
            _interval(row, "cellfeed_is_times_as_fast", ".3g", unit=" x"),
            _share(row),
            _interval(row, "first_minibatch_s", ".2f", unit=" s"),
            _gigabytes(row["peak_bytes"]),
            "none" if row["conversion_s"] is None else f"{row['conversion_s']:.0f} s",
            _gigabytes(row["store_bytes"]),
        )
        for row in rows
    ]
    header = (
        "loader",
        "cells/s",
        "cellfeed is faster by",
        "of the limit",
        "first minibatch",
        "memory",
        "conversion",
        "its size on disk",
    )
    return _table(header, lines)


def _limits_table(rows: Sequence[Row]) -> str:
    lines = [
        (
            row["name"],
            _failed_or(row, _interval(row, "cells_per_s", ",.0f")),
            _interval(row, "gb_per_s", ".2f"),
        )
        for row in rows
    ]
    return _table(("limit", "cells/s", "GB/s moved"), lines)


def _conversions_table(stores: dict[str, Store]) -> str:
    lines = []
    for store in stores.values():
        times = median_with_interval([run["seconds"] for run in store.runs])
        seconds = (
            None if times is None else f"{times.value:.0f} [{times.low:.0f}, {times.high:.0f}]"
        )
        lines.append(
            (
                store.conversion.title,
                f"failed: {store.error}" if store.error else seconds or "",
                str(len(store.runs)),
                _gigabytes(max((run["peak_bytes"] for run in store.runs), default=None)),
                _gigabytes(store.runs[-1]["disk_bytes"] if store.runs else None),
            )
        )
    return _table(("conversion", "seconds", "runs", "most memory", "on disk"), lines)


def _targets_table(verdicts: Sequence[Verdict]) -> str:
    lines = [
        (
            verdict.text,
            "" if verdict.ratio is None else _brackets(verdict.ratio),
            verdict.against,
            verdict.verdict,
        )
        for verdict in verdicts
    ]
    return _table(("target", "measured", "against", ""), lines)


def _failed_or(row: Row, figure: str) -> str:
    if row["failed"] is None:
        return figure
    reason = f"failed: {row['failed']}"
    return f"{figure}; then {reason}" if figure else reason


def _interval(row: Row, name: str, form: str, *, unit: str = "") -> str:
    if row[name] is None:
        return ""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:{form}}{unit} [{low:{form}}, {high:{form}}]"


def _brackets(estimate: Estimate) -> str:
    return f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]"


def _share(row: Row) -> str:
    return "" if row["of_limit"] is None else f"{row['of_limit']:.0%} of `{row['limit']}`"


def _gigabytes(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / 1e9:.2f} GB"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    shown = [[cell.replace("|", "/") for cell in line] for line in lines]
    rules = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rules, *shown])
