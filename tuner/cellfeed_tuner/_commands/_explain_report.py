"""What ``autotune explain`` prints: why one configuration was chosen, and why another was not."""

import json
from dataclasses import asdict, dataclass
from math import isfinite, log, log2
from pathlib import Path
from statistics import NormalDist
from typing import Any

import click
import numpy as np
from rich.table import Table
from rich.text import Text

from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._explain._bottleneck import Bottleneck, microseconds, with_training_step
from cellfeed_tuner._interval import CONFIDENCE, Estimate, interval
from cellfeed_tuner._plain import to_plain
from cellfeed_tuner._planning._cost_model import CostModel, Geometry, Observation
from cellfeed_tuner._planning._recommend import choose
from cellfeed_tuner._reports._console import report_console, say
from cellfeed_tuner._reports._words import in_words
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import STATUS_WORDS, ConfigurationResult

__all__ = ["explain"]

_BAR_WIDTH = 24
# Standard errors on either side of a mean that its interval covers.
_HALF_WIDTH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Which configurations a question is about; None stands for any."""

    block_size: int | None = None
    fetch_factor: int | None = None
    num_workers: int | None = None

    @property
    def settings(self) -> dict[str, int]:
        """What was asked for, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def completed(self, chosen: Configuration | None) -> Configuration | None:
        """Return it with what was left open as it is in the chosen one; None if a size is open."""
        settings: dict[str, Any] = dict(chosen) if chosen else {"num_workers": 0}
        settings |= self.settings
        if not {"block_size", "fetch_factor"} <= settings.keys():
            return None
        return Configuration(**settings)

    def __str__(self) -> str:
        named = {name.removeprefix("num_"): value for name, value in self.settings.items()}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Why:
    """What is known of the ``n_matching`` configurations of the grid that a question is about.

    Of them, it is ``about`` the best. If there is none, it is about what comes nearest, of what was
    measured; ``outside`` is then what was asked for, with the recommended one's settings where
    nothing was said (None if that leaves a size open), and ``homogeneous_bits`` its entropy if
    every block held one label. ``predicted`` is what the cost model, fitted to all that was
    measured, gives for it; ``speed_ratio`` its throughput as a share of the chosen one's, both as
    searched; ``reasons`` what speaks against it, or for the chosen one.
    """

    asked: _Asked
    n_matching: int
    outside: Configuration | None
    about: ConfigurationResult
    is_chosen: bool
    speed_ratio: float | None
    predicted: Estimate | None
    homogeneous_bits: float | None
    reasons: tuple[str, ...]


def explain(saved: Path, *, step_ms: float | None, as_json: bool, **settings: int | None) -> None:
    """Explain what is saved; see `explain_command`."""
    result = AutotuneResult.load(saved)
    found = result.bottleneck
    if found is not None and step_ms is not None:
        found = with_training_step(found, step_ms / 1e3 / result.dataset.batch_size)
    asked = _Asked(**settings)
    answer = _why(result, asked) if asked.settings else None
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


def _facts(result: AutotuneResult, answer: _Why) -> Table:
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


def _why(result: AutotuneResult, asked: _Asked) -> _Why:
    """Return why something was not chosen, or was."""
    chosen, outside = result.chosen, None
    matching = [
        each
        for each in result.configurations
        if asked.settings.items() <= each.configuration.items()
    ]
    if matching:
        choice = choose(matching, result.constraints)
        about = choice.result if choice else max(matching, key=lambda each: _rank(each, result))
    else:
        outside = asked.completed(chosen.configuration if chosen else None)
        about = _nearest(outside or asked, result)
    speeds = [each.cells_per_second for each in (about, chosen) if each and each.cells_per_second]
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
        speed_ratio=speeds[0].value / speeds[1].value if len(speeds) > 1 else None,
        predicted=_predicted(result, outside or about.configuration),
        homogeneous_bits=None if outside is None else _homogeneous_bits(result, outside),
        reasons=tuple(reasons),
    )


def _rank(each: ConfigurationResult, result: AutotuneResult) -> tuple[bool, float, float]:
    """Return what is larger of what comes nearer to being chosen, where nothing would be."""
    speed = each.cells_per_second.value if each.cells_per_second else 0.0
    share = each.least_mixed.share_of_random
    mixes = result.constraints.mixes(share)
    return mixes, speed if mixes else share, speed


def _nearest(wanted: _Asked | Configuration, result: AutotuneResult) -> ConfigurationResult:
    """Return what is the fewest doublings away in both sizes together, of what was measured.

    Of several, the one with the most similar number of workers; of the whole grid if nothing was
    measured.
    """

    def apart(each: ConfigurationResult) -> tuple[float, float]:
        settings = each.configuration
        sizes = (
            (wanted.block_size, settings.block_size),
            (wanted.fetch_factor, settings.fetch_factor),
        )
        doublings = sum(abs(log2(size / given)) for size, given in sizes if size is not None)
        return doublings, abs((wanted.num_workers or 0) - settings.num_workers)

    measured = [each for each in result.configurations if each.cells_per_second is not None]
    return min(measured or result.configurations, key=apart)


def _predicted(result: AutotuneResult, configuration: Configuration) -> Estimate | None:
    """Return what the cost model makes of all measured throughputs."""
    seen = {
        each.configuration: Observation(1 / speed.value, _relative_error(speed))
        for each in result.configurations
        if (speed := each.cells_per_second) is not None
    }
    if not seen:
        return None
    dataset = result.dataset
    known = list(
        dict.fromkeys([*(each.configuration for each in result.configurations), configuration])
    )
    geometry = Geometry(
        n_cells=dataset.n_visited,
        rows_per_chunk=dataset.visited_per_chunk,
        n_files=len(dataset.paths),
        n_ranks=result.ranks.n_total,
    )
    mean, covariance = CostModel(known, dataset.batch_size, geometry).posterior(seen)
    place = known.index(configuration)
    half = _HALF_WIDTH * covariance[place, place] ** 0.5
    low, middle, high = np.exp(-mean[place] + half * np.array([-1.0, 0.0, 1.0])).tolist()
    return Estimate(middle, low, high)


def _relative_error(speed: Estimate) -> float:
    """Return what an interval takes for the standard error, or more: its ends are Student's."""
    return log(speed.high / speed.low) / (2 * _HALF_WIDTH) if isfinite(speed.high) else 1.0


def _homogeneous_bits(result: AutotuneResult, configuration: Configuration) -> float | None:
    counts, batch_size = result.dataset.label_counts, result.dataset.batch_size
    if not counts or result.strategy is not None:
        return None
    block_size, fetch_factor = configuration.block_size, configuration.fetch_factor
    return theory.expected_entropy_bits(counts, batch_size, block_size, fetch_factor)
