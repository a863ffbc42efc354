"""What ``autotune explain`` prints."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cellfeed_tuner._explain._bottleneck import Bottleneck, microseconds, with_training_step
from cellfeed_tuner._interval import interval
from cellfeed_tuner._plain import to_plain
from cellfeed_tuner._reports._console import report_console
from cellfeed_tuner._reports._why import Asked, Why, why
from cellfeed_tuner._reports._wording import (
    how_measured,
    interruption_in_words,
    loader_faults,
    prefetch_in_words,
    status_in_words,
    why_no_bottleneck,
    why_no_choice,
    why_nothing,
)
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import ConfigurationResult

__all__ = ["explain"]

_BAR_WIDTH = 24


def explain(
    saved: Path,
    *,
    block_size: int | None,
    fetch_factor: int | None,
    num_workers: int | None,
    step_ms: float | None,
    as_json: bool,
) -> None:
    """Explain what is saved; see `explain_command`."""
    result = AutotuneResult.load(saved)
    found = result.bottleneck
    if found is not None and step_ms is not None:
        found = with_training_step(found, step_ms / 1e3 / result.dataset.batch_size)
    asked = Asked(block_size=block_size, fetch_factor=fetch_factor, num_workers=num_workers)
    answer = why(result, asked) if str(asked) else None
    if as_json:
        click.echo(json.dumps(_json(result, answer, found), indent=1, allow_nan=False))
        return
    console = report_console(width=100)
    for each in [*loader_faults(result), *interruption_in_words(result)]:
        _say(console, each, "bold red")
    if answer is None:
        _print_choice(console, result)
        _print_bottleneck(console, result, found)
    else:
        _print_answer(console, result, answer)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))


def _print_choice(console: Console, result: AutotuneResult) -> None:
    chosen = result.recommended
    if chosen is None:
        _say(console, why_no_choice(result), "bold red")
        _say(console, why_nothing(result))
        return
    _say(console, chosen.settings, "bold green")
    _say(console, f"{interval(chosen.cells_per_second)} cells/s, {how_measured(result)}.")
    _say(console, chosen.reason)
    for each in prefetch_in_words(result):
        _say(console, each)


def _print_bottleneck(console: Console, result: AutotuneResult, found: Bottleneck | None) -> None:
    if found is None:
        _say(console, f"\nWhere the time goes: {why_no_bottleneck(result)}")
        return
    _say(console, f"\n{found.sentence}")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage, over all threads")
    table.add_column("us/cell [95 % interval]", justify="right", no_wrap=True)
    table.add_column("")
    longest = max(each.seconds_per_cell.value for each in found.stages)
    for each in found.stages:
        seconds = each.seconds_per_cell
        bar = "█" * round(_BAR_WIDTH * max(0.0, seconds.value) / longest)
        style = "bold" if each.name == found.kind else ""
        table.add_row(each.label, microseconds(seconds), bar, style=style)
    console.print("", table)
    _say(
        console,
        f"\nCounted while {found.n_rounds} rounds were measured; side by side, the stages explain "
        f"{found.accounted:.0%} of the time.",
        "dim",
    )
    if found.read_amplification is not None:
        _say(
            console,
            f"{found.read_amplification:.2f} bytes are decompressed for each that is used.",
        )
    if found.seconds.get("training", 0.0) < found.measured_seconds_per_cell:
        step = 1e3 * found.measured_seconds_per_cell * result.dataset.batch_size
        _say(
            console,
            f"A training step longer than {step:,.1f} ms hides all of this, if it leaves the "
            "processors free.",
        )
    for advice in result.storage_advice:
        _say(console, advice.sentence)


def _print_answer(console: Console, result: AutotuneResult, answer: Why) -> None:
    about, chosen = answer.about, result.recommended
    said = str(about.configuration)
    if answer.n_matching > 1:
        said = f"Of {answer.n_matching} configurations with {answer.asked}, the best is {said}."
    if answer.n_matching:
        _say(console, said, "bold")
    else:
        _say(console, f"{answer.asked} is not in the grid.", "bold")
        _print_outside(console, answer)
        measured = "" if about.cells_per_second is None else " of what was measured"
        both = ", in block size and fetch factor together," if answer.outside else ""
        _say(console, f"\nNearest{measured}{both} is {said}:")
    if answer.is_chosen:
        _say(console, "It is the recommended one.")
    elif chosen is not None:
        _say(console, f"Recommended instead: {chosen.configuration}.")
    for reason in answer.reasons:
        _say(console, f"- {reason}")
    console.print("", _facts(result, answer))


def _print_outside(console: Console, answer: Why) -> None:
    if answer.outside is None:
        return
    _say(console, f"For {answer.outside}:")
    if answer.homogeneous_bits is not None:
        random = answer.about.entropy_bits.random
        share = answer.homogeneous_bits / random if random else 1.0
        _say(
            console,
            f"- If every block held one label, minibatches would have "
            f"{answer.homogeneous_bits:.3f} bits, {share:.1%} of random sampling's.",
        )
    if answer.predicted is not None:
        _say(console, f"- The cost model expects {interval(answer.predicted)} cells/s.")


def _facts(result: AutotuneResult, answer: Why) -> Table:
    about, constraints = answer.about, result.constraints
    entropy = about.entropy_bits
    table = Table.grid(padding=(0, 2))
    rows = [
        ("status", status_in_words(about) + (f" ({about.note})" if about.note else "")),
        ("throughput", _throughput(about)),
    ]
    if answer.speed_ratio is not None and not answer.is_chosen:
        rows.append(("", f"{answer.speed_ratio:.2f} times the chosen one's in the same search"))
    if answer.predicted is not None and answer.n_matching:
        rows.append(("by the cost model", f"{interval(answer.predicted)} cells/s"))
    share = f"{entropy.share_of_random:.1%} of random sampling's"
    floor = f"floor {constraints.entropy_floor:.0%}"
    rows.append(("entropy", f"{entropy.expected.value:.3f} bits, {share} ({floor})"))
    limit = f"of {constraints.memory_bytes / 1e6:,.0f} MB given"
    peak = about.peak_memory_bytes
    rows.append(("memory", f"{peak / 1e6:,.0f} MB {limit}" if peak else f"not known, {limit}"))
    if about.verdict is not None:
        rows.append(("proof", about.verdict.sentence))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _throughput(about: ConfigurationResult) -> str:
    if about.cells_per_second is None:
        return "not known"
    few = f" (from {about.n_rounds} rounds only)" if about.has_few_rounds else ""
    return f"{interval(about.cells_per_second)} cells/s{few}"


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
