"""What ``autotune explain`` prints: why one configuration was chosen, and why another was not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from cellfeed_tuner import theory
from cellfeed_tuner._bottleneck import Bottleneck, microseconds, with_training_step
from cellfeed_tuner._choose import Ordering, choose
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate, interval, times
from cellfeed_tuner._reports import report_console, say
from cellfeed_tuner._reports._text import floor_cost, in_words, megabytes, say_choice
from cellfeed_tuner._result import AutotuneResult, to_plain
from cellfeed_tuner._results import STATUS_WORDS, ConfigurationResult

_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Why:
    """The answer to a question; ``n_matching`` configurations have the settings that it names.

    ``about`` is the best of them; if there are none, the nearest that was measured. ``outside`` is
    then the configuration in question, completed by the recommendation, and ``homogeneous_bits``
    its entropy if every block held a single label. ``predicted`` is the throughput of one that was
    not timed; ``speed_ratio`` its throughput divided by that of the recommendation; ``reasons`` say
    why it was not chosen, or why it was.
    """

    asked: Mapping[str, int | None]
    n_matching: int
    outside: Configuration | None
    about: ConfigurationResult
    is_chosen: bool
    speed_ratio: float | None
    predicted: Estimate | None
    homogeneous_bits: float | None
    reasons: tuple[str, ...]

    @property
    def question(self) -> str:
        """The settings in question."""
        return ", ".join(
            f"{name.removeprefix('num_').replace('_', ' ')} {value}"
            for name, value in self.asked.items()
            if value is not None
        )


def explain(saved: Path, *, step_ms: float | None, as_json: bool, **settings: int | None) -> None:
    """Explain a saved result; see `explain_command`."""
    result = AutotuneResult.load(saved)
    found = result.bottleneck
    if found is not None and step_ms is not None:
        found = with_training_step(found, step_ms / 1e3 / result.dataset.batch_size)
    answer = _why(result, settings) if any(each is not None for each in settings.values()) else None
    if as_json:
        click.echo(json.dumps(_json(result, answer, found), indent=1, allow_nan=False))
        return
    console = report_console(width=100)
    say(console, in_words("faults", result) + in_words("interruption", result), "bold red")
    if answer is not None:
        about, *others = in_words("answer", result, answer)
        say(console, [about], "bold")
        say(console, others)
        console.print("", _facts(result, answer))
        return
    say_choice(console, result)
    say(console, in_words("floor", result, floor_cost(result)))
    if found is None:
        say(console, ["", f"Where the time goes: {in_words('no_bottleneck', result)[0]}"])
    else:
        say(console, ["", found.sentence])
        console.print("", _stages(found), "")
        say(console, in_words("bottleneck", result, found))


def _stages(found: Bottleneck) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage, all threads together")
    table.add_column("us/cell [95 % interval]", justify="right", no_wrap=True)
    table.add_column("")
    longest = max(found.seconds.values())
    for each in found.stages:
        bar = "█" * round(_BAR_WIDTH * max(0.0, each.seconds_per_cell.value) / longest)
        style = "bold" if each.name == found.kind else ""
        table.add_row(each.label, microseconds(each.seconds_per_cell), bar, style=style)
    return table


def _facts(result: AutotuneResult, answer: _Why) -> Table:
    about, asked = answer.about, result.constraints
    speed, unit = "not timed", f"{result.dataset.unit}/s"
    if about.cells_per_second is not None:
        speed = f"{interval(about.cells_per_second)} {unit}"
    peak, limit = about.peak_memory_bytes, f"limit {megabytes(asked.memory_bytes)}"
    (mixed,) = in_words("share", about.entropy_bits)
    facts = [
        ("status", STATUS_WORDS[about.status].listed + (about.note and f" ({about.note})")),
        ("throughput", speed),
        *(
            [("entropy", f"{mixed} (floor {asked.entropy_floor:.0%})")]
            * bool(result.dataset.labels)
        ),
        ("memory", f"{megabytes(peak)} ({limit})" if peak else f"not measured ({limit})"),
    ]
    if answer.predicted is not None:
        facts.insert(2, ("predicted", f"{interval(answer.predicted)} {unit}"))
    ratio = about.relative
    if ratio is not None and not answer.is_chosen:
        facts.insert(2, ("", f"{times(ratio)} the recommended throughput"))
    if about.verdict is not None:
        facts.append(("check", about.verdict.sentence))
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _why(result: AutotuneResult, asked: Mapping[str, int | None]) -> _Why:
    """Return why the configurations in question were not chosen, or were."""
    chosen, outside, homogeneous = result.chosen, None, None
    named = {name: value for name, value in asked.items() if value is not None}
    matching = [
        each for each in result.configurations if named.items() <= each.configuration.items()
    ]
    if matching:
        choice = choose(matching, result.constraints, Ordering.of(result.configurations))
        about = choice.result if choice else max(matching, key=lambda each: _rank(each, result))
    else:
        whole: dict[str, Any] = {
            "num_workers": 0,
            **(chosen.configuration if chosen else {}),
            **named,
        }
        about = _nearest(whole, result)
        if {"block_size", "fetch_factor"} <= whole.keys():
            outside = Configuration(**whole)
            homogeneous = _homogeneous_bits(outside, result)
    ratio = about.relative
    is_chosen = about == chosen
    reasons = in_words("against", result, about)
    if is_chosen and result.recommended is not None:
        reasons = [result.recommended.reason]
    return _Why(
        asked=asked,
        n_matching=len(matching),
        outside=outside,
        about=about,
        is_chosen=is_chosen,
        speed_ratio=None if ratio is None else ratio.value,
        predicted=result.predicted(about) if matching else None,
        homogeneous_bits=homogeneous,
        reasons=tuple(reasons),
    )


def _rank(each: ConfigurationResult, result: AutotuneResult) -> tuple[bool, float, float]:
    """Return a key that is larger the closer a configuration comes to being chosen."""
    speed = each.cells_per_second.value if each.cells_per_second else 0.0
    share = each.least_mixed.share_of_random
    mixes = result.constraints.mixes(share)
    return mixes, speed if mixes else share, speed


def _homogeneous_bits(configuration: Configuration, result: AutotuneResult) -> float | None:
    dataset = result.dataset
    if not dataset.label_counts or result.strategy is not None:
        return None
    sizes = configuration.block_size, configuration.fetch_factor
    return theory.expected_entropy_bits(dataset.label_counts, dataset.batch_size, *sizes)


def _nearest(wanted: Mapping[str, int], result: AutotuneResult) -> ConfigurationResult:
    """Return the measured configuration that is the fewest doublings away in both sizes together.

    Ties go to the closest number of workers. If nothing was measured, any configuration counts.
    """

    def apart(each: ConfigurationResult) -> tuple[float, float]:
        settings = each.configuration
        sizes = {"block_size": settings.block_size, "fetch_factor": settings.fetch_factor}
        doublings = sum(
            abs(log2(wanted[name] / size)) for name, size in sizes.items() if name in wanted
        )
        return doublings, abs(wanted["num_workers"] - settings.num_workers)

    measured = [each for each in result.configurations if each.cells_per_second is not None]
    return min(measured or result.configurations, key=apart)


def _json(result: AutotuneResult, answer: _Why | None, found: Bottleneck | None) -> dict[str, Any]:
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
