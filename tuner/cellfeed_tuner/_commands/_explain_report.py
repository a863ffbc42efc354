"""What ``autotune explain`` prints."""

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from cellfeed_tuner._explain._bottleneck import Bottleneck, microseconds, with_training_step
from cellfeed_tuner._interval import interval
from cellfeed_tuner._plain import to_plain
from cellfeed_tuner._reports._console import report_console, say
from cellfeed_tuner._reports._why import Asked, Why, why
from cellfeed_tuner._reports._words import in_words
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import STATUS_WORDS

__all__ = ["explain"]

_BAR_WIDTH = 24


def explain(saved: Path, *, step_ms: float | None, as_json: bool, **settings: int | None) -> None:
    """Explain what is saved; see `explain_command`."""
    result = AutotuneResult.load(saved)
    found = result.bottleneck
    if found is not None and step_ms is not None:
        found = with_training_step(found, step_ms / 1e3 / result.dataset.batch_size)
    asked = Asked(**settings)
    answer = why(result, asked) if asked.settings else None
    if as_json:
        click.echo(json.dumps(_json(result, answer, found), indent=1, allow_nan=False))
        return
    console, chosen = report_console(width=100), result.recommended
    say(console, in_words("faults", result) + in_words("interruption", result), "bold red")
    if answer is not None:
        about, *others = in_words("answer", result, answer)
        say(console, [about], "bold")
        say(console, others)
        console.print("", _facts(result, answer))
        return
    if chosen is None:
        say(console, in_words("no_choice", result), "bold red")
        say(console, in_words("nothing", result))
    else:
        say(console, [chosen.settings], "bold green")
        say(console, in_words("why", result))
    if found is None:
        say(console, ["", f"Where the time goes: {in_words('no_bottleneck', result)[0]}"])
    else:
        say(console, ["", found.sentence])
        console.print("", _stages(found), "")
        say(console, in_words("bottleneck", result, found))


def _stages(found: Bottleneck) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage, over all threads")
    table.add_column("us/cell [95 % interval]", justify="right", no_wrap=True)
    table.add_column("")
    longest = max(found.seconds.values())
    for each in found.stages:
        bar = "█" * round(_BAR_WIDTH * max(0.0, each.seconds_per_cell.value) / longest)
        style = "bold" if each.name == found.kind else ""
        table.add_row(each.label, microseconds(each.seconds_per_cell), bar, style=style)
    return table


def _facts(result: AutotuneResult, answer: Why) -> Table:
    about, asked = answer.about, result.constraints
    speed, few = "not known", f" (from {about.n_rounds} rounds only)" * about.has_few_rounds
    if about.cells_per_second is not None:
        speed = f"{interval(about.cells_per_second)} cells/s{few}"
    peak, limit = about.peak_memory_bytes, f"of {asked.memory_bytes / 1e6:,.0f} MB given"
    (mixed,) = in_words("share", about.entropy_bits)
    facts = [
        ("status", STATUS_WORDS[about.status].listed + (about.note and f" ({about.note})")),
        ("throughput", speed),
        ("entropy", f"{mixed} (floor {asked.entropy_floor:.0%})"),
        ("memory", f"{peak / 1e6:,.0f} MB {limit}" if peak else f"not known, {limit}"),
    ]
    if answer.predicted is not None and answer.n_matching:
        facts.insert(2, ("by the cost model", f"{interval(answer.predicted)} cells/s"))
    if answer.speed_ratio is not None and not answer.is_chosen:
        facts.insert(2, ("", f"{answer.speed_ratio:.2f} times the chosen one's in the same search"))
    if about.verdict is not None:
        facts.append(("proof", about.verdict.sentence))
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _json(result: AutotuneResult, answer: Why | None, found: Bottleneck | None) -> dict[str, Any]:
    plain = result.to_json()
    return {
        "schema": "cellfeed.explain/2",
        "recommended": plain["recommended"],
        "nearest": plain["nearest"],
        "bottleneck": found and to_plain(found) | {"sentence": found.sentence},
        "storage_advice": [
            to_plain(each) | {"sentence": each.sentence} for each in result.storage_advice
        ],
        "answer": answer and to_plain(answer),
    }
