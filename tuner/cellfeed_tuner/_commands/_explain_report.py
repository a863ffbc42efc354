"""What ``autotune explain`` prints: why one configuration was chosen, and why another was not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cellfeed_tuner._bottleneck import microseconds, with_training_step
from cellfeed_tuner._reports import report_console, say
from cellfeed_tuner._reports._text import cells_of, fastest_below_floor, in_words, sentences
from cellfeed_tuner._result import AutotuneResult, to_plain
from cellfeed_tuner._results import ConfigurationResult

_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The best configuration with the settings in question, of so many.

    If there are none, the nearest that was timed.
    """

    settings: Mapping[str, int]
    n_matching: int
    about: ConfigurationResult


def explain(saved: Path, *, step_ms: float | None, as_json: bool, **settings: int | None) -> None:
    """Explain a saved result; see `explain_command`."""
    result = AutotuneResult.load(saved)
    if result.bottleneck is not None and step_ms is not None:
        seconds = step_ms / 1e3 / result.dataset.batch_size
        result = replace(result, bottleneck=with_training_step(result.bottleneck, seconds))
    asked = {name: value for name, value in settings.items() if value is not None}
    answer = _answer(result, asked) if asked else None
    if as_json:
        click.echo(json.dumps(_json(result, answer), indent=1, allow_nan=False))
        return
    console = report_console(width=100)
    if answer is not None:
        say(console, in_words("faults", result) + in_words("interruption", result), "bold red")
        _print_answer(console, result, answer)
        return
    for line in sentences(result):
        say(console, [line.text], line.style)
    say(console, in_words("floor", result, fastest_below_floor(result)))
    found = result.bottleneck
    if found is None:
        say(console, ["", f"Where the time goes: {in_words('no_bottleneck', result)[0]}"])
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage, all threads together")
    table.add_column("us/cell [95 % interval]", justify="right", no_wrap=True)
    table.add_column("")
    longest = max(found.seconds.values())
    for each in found.stages:
        bar = "█" * round(_BAR_WIDTH * max(0.0, each.seconds_per_cell.value) / longest)
        style = "bold" if each.name == found.kind else ""
        table.add_row(each.label, microseconds(each.seconds_per_cell), bar, style=style)
    console.print("", table, "")
    say(console, in_words("stages", result, found))


def _answer(result: AutotuneResult, settings: Mapping[str, int]) -> _Answer:
    """Return the one of the configurations in question that comes closest to being chosen."""
    matching = [
        each for each in result.configurations if settings.items() <= each.configuration.items()
    ]

    def rank(each: ConfigurationResult) -> tuple[bool, bool, float, float]:
        share = each.share_of_random
        mixes = result.constraints.mixes(share)
        speed = each.cells_per_second.value if each.cells_per_second else 0.0
        return each is result.chosen, mixes, speed if mixes else share, speed

    def apart(each: ConfigurationResult) -> tuple[float, float]:
        """Return how many doublings lie between the sizes; then how many workers."""
        wanted: dict[str, Any] = {
            **(result.chosen.configuration if result.chosen else {}),
            **settings,
        }
        sizes = ("block_size", "fetch_factor")
        own: dict[str, Any] = dict(each.configuration)
        doublings = sum(abs(log2(wanted[name] / own[name])) for name in sizes if name in wanted)
        return doublings, abs(wanted.get("num_workers", 0) - each.configuration.num_workers)

    timed = [each for each in result.configurations if each.cells_per_second is not None]
    about = max(matching, key=rank) if matching else min(timed or result.configurations, key=apart)
    return _Answer(settings=settings, n_matching=len(matching), about=about)


def _print_answer(console: Console, result: AutotuneResult, answer: _Answer) -> None:
    """Print a configuration beside the recommended one."""
    about, asked = answer.about, result.constraints
    question = ", ".join(
        f"{name.removeprefix('num_').replace('_', ' ')} {value}"
        for name, value in answer.settings.items()
    )
    said = f"The configuration with {question}:"
    if answer.n_matching > 1:
        said = f"The best of {answer.n_matching} configurations with {question}:"
    elif not answer.n_matching:
        nearest = "nearest timed configuration" if about.cells_per_second else "nearest"
        said = f"{question} is not in the grid; autotune can be given it. The {nearest}:"
    say(console, [said], "bold")
    compared = {"in question": cells_of(result, about)}
    if result.chosen is not None and about is not result.chosen:
        compared["recommended"] = cells_of(result, result.chosen)
    outcome = compared["in question"].pop("outcome")
    table = Table.grid(padding=(0, 2))
    if len(compared) > 1:
        table.add_row("", *compared, style="bold")
    for heading in compared["in question"]:
        table.add_row(
            Text(heading, style="dim"), *(Text(each[heading]) for each in compared.values())
        )
    console.print("", table, "")
    say(console, [f"Outcome: {outcome}."])
    required = f"at most {asked.memory_bytes / 1e6:,.0f} MB of memory"
    if about.is_expected_to_mix:
        required = f"{asked.entropy_floor:.0%} of random sampling's entropy, {required}"
    say(console, [f"Required: {required}."])
    say(console, [each.sentence for each in about.verdicts])


def _json(result: AutotuneResult, answer: _Answer | None) -> dict[str, Any]:
    plain, found = result.to_json(), result.bottleneck
    return {
        "schema": "cellfeed.explain/3",
        "recommended": plain["recommended"],
        "nearest": plain["nearest"],
        "bottleneck": found and to_plain(found) | {"sentence": found.sentence},
        "storage_advice": [
            to_plain(each) | {"sentence": each.sentence} for each in result.storage_advice
        ],
        "answer": answer
        and to_plain(answer) | {"outcome": cells_of(result, answer.about)["outcome"]},
    }
