"""Sentences and HTML about a result, from the templates beside this module."""

import shlex
from collections import Counter
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import jinja2
from rich.text import Text

from cellfeed.console import format_bytes
from cellfeed_tuner import _constants, _interval
from cellfeed_tuner._bottleneck import microseconds
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import (
    Estimate,
    interval,
    is_undecided,
    is_unknown,
    quotient,
    times,
)
from cellfeed_tuner._reports import report_console, say
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results import STATUS_MEANINGS, ConfigurationResult
from cellfeed_tuner._storage_advice import folder_of

MOST_LINES = 8
"""Lines of the report without the code. Chosen: what is read at a glance."""
_ONLY_EXPLAINED = 9
"""The rank of sentences that only ``autotune explain`` prints."""


def in_words(what: str, *about: object) -> list[str]:
    """Return the sentences of a macro in ``words.jinja``; there may be none."""
    macro = getattr(_TEMPLATES.get_template("words.jinja").module, what)
    return [line for line in str(macro(*about)).splitlines() if line]


def rendered(template: str, result: AutotuneResult, **values: Any) -> str:
    """Return the escaped HTML of a template."""
    chosen = result.chosen
    figures = {"basis": in_words("how_known", result)[0]} if result.recommended else {}
    figures |= figures_of(result, chosen) if chosen else {}
    made = _TEMPLATES.get_template(template).render(result=result, figures=figures, **values)
    return made.encode("utf-8", "replace").decode()  # file names need not be UTF-8


def html_summary(result: AutotuneResult) -> str:
    """Return what a notebook shows: an element that needs no style."""
    return rendered("notebook.html.jinja", result)


def megabytes(n_bytes: int) -> str:
    """Return the memory of processes, written the same everywhere."""
    return f"{n_bytes / 1e6:,.0f} MB"


def figures_of(result: AutotuneResult, each: ConfigurationResult) -> dict[str, str]:
    """Return throughput, entropies and memory of a configuration, by heading."""
    speed, memory = each.cells_per_second, each.peak_memory_bytes
    shown = interval(speed) if speed else "unknown"
    if predicted := result.predicted(each):
        shown = f"{interval(predicted)} (predicted)"
    figures = {f"{result.dataset.unit}/s [95 % interval]": shown}
    for name, found in each.labels.items():
        (figures[f"entropy of {name} / random"],) = in_words("share", found.entropy_bits)
    return figures | {"memory": megabytes(memory) if memory else "unknown"}


def cells_of(result: AutotuneResult, each: ConfigurationResult) -> dict[str, str]:
    """Return what the table of the page has of a configuration, by heading."""
    names = dict.fromkeys(name for one in result.configurations for name in one.configuration)
    why = in_words("why_not", result, each) + [each.note] * bool(each.note)
    ratio = each.relative
    return (
        {
            name.removeprefix("num_").replace("_", " "): str(each.configuration.get(name, ""))
            for name in names
        }
        | figures_of(result, each)
        | {
            "times recommended": times(ratio) if ratio and not is_unknown(ratio) else "unknown",
            "verdict": ", ".join(verdict.kind for verdict in each.verdicts),
            "outcome": ": ".join(why),
        }
    )


_Ratio = tuple[Configuration, Estimate]


def compared(result: AutotuneResult) -> list[_Ratio]:
    """Return what the choice was compared with, each with its throughput relative to it."""
    chosen = result.recommended
    return [
        (each.configuration, quotient(Estimate(1.0, 1.0, 1.0), each.ratio))
        for each in (chosen.rivals if chosen else ())
    ]


def undecided(result: AutotuneResult) -> list[_Ratio]:
    """Return those of which it is open whether they are faster, the closest first.

    Without any comparison, those that were timed and meet the constraints, unless what was not
    timed is probably faster still.
    """
    chosen, asked, found = result.recommended, result.constraints, compared(result)
    is_timed = chosen is not None and chosen.basis == "timed" and not chosen.may_be_surpassed
    if is_timed and asked.need_cells_per_second is None:
        found = [
            (each.configuration, each.relative)
            for each in result.configurations
            if each is not result.chosen
            and each.cells_per_second is not None
            and each.relative is not None
            and asked.allow(each)
        ]
        found.sort(key=lambda each: -each[1].value)
    return [each for each in found if is_undecided(each[1])]


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__),
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_TEMPLATES.globals.update(
    STATUS_MEANINGS=STATUS_MEANINGS,
    bytes=format_bytes,
    compared=compared,
    constants=_constants,
    in_words=in_words,
    intervals=_interval,
    megabytes=megabytes,
    microseconds=microseconds,
    undecided=undecided,
)
_TEMPLATES.filters.update(
    counted=lambda values: Counter(values).most_common(),
    ended=lambda text: text if text.endswith((".", "!", "?")) else f"{text}.",
    quoted=shlex.quote,
)


def fastest_below_floor(result: AutotuneResult) -> ConfigurationResult | None:
    """Return the fastest configuration below the entropy floor, timed or predicted.

    None if none is known, or if throughput is not sought.
    """
    asked, relatives = result.constraints, list[tuple[float, ConfigurationResult]]()
    if result.recommended is not None and asked.need_cells_per_second is None:
        relatives = [
            (each.relative.value, each)
            for each in result.configurations
            if each.relative is not None
            and not asked.mixes(each.share_of_random)
            and (each.status == "below entropy floor" or each.cells_per_second is not None)
            and (each.peak_memory_bytes or 0) <= asked.memory_bytes
        ]
    return max(relatives, key=lambda found: found[0], default=(0.0, None))[1]


class _Said(NamedTuple):
    """A sentence; a report of few lines leaves out those with the highest rank."""

    text: str
    rank: int
    style: str = ""


def sentences(result: AutotuneResult) -> list[_Said]:
    """Return what to set, how sure that is, why, what may help, and what to beware of."""

    def said(what: str, rank: int, style: str = "") -> list[_Said]:
        return [_Said(line, rank, style) for line in in_words(what, result)]

    lines = list[_Said]()
    if result.recommended is None:
        lines += said("no_choice", 0, "bold red") + said("nothing", 1)
    else:
        lines += [_Said(f"Recommended: {result.recommended.settings}", 0, "bold green")]
        lines += said("figures", 0)
        lines += [_Said(result.recommended.reason, 1)]
        lines += said("waiting", 1) + said("prefetch", 5) + said("rivals", _rank_of_rivals(result))
        lines += said("workers", 2) + said("link", 7) + said("mixed_less", 4)
        lines += said("longest", _ONLY_EXPLAINED)
    if result.bottleneck is not None:
        lines.append(_Said(result.bottleneck.sentence, 6))
    lines += [_Said(advice.sentence, 4) for advice in result.storage_advice]
    return lines + said("warnings", 1, "bold yellow") + said("untimed", 8)


def _rank_of_rivals(result: AutotuneResult) -> int:
    chosen = result.recommended
    return 1 if undecided(result) or (chosen and chosen.may_be_surpassed) else 3


def print_report(result: AutotuneResult, saved_as: Path, *, to_stderr: bool = False) -> None:
    """Print the recommendation and why in at most `MOST_LINES`, and the code to paste.

    The page and ``autotune explain`` have the rest.
    """
    console = report_console(to_stderr=to_stderr, width=100)
    console.print()
    if result.loader_fault is not None:
        say(console, in_words("no_choice", result), "bold red reverse")
        say(console, in_words("faults", result), "bold red")
        return
    lines = [each for each in sentences(result) if each.rank < _ONLY_EXPLAINED]
    while (
        len(lines) > 1
        and sum(len(Text(each.text).wrap(console, console.width)) for each in lines) > MOST_LINES
    ):
        lines.remove(max(reversed(lines), key=lambda each: each.rank))
    for each in lines:
        say(console, [each.text], each.style)
    if result.scaling is not None:
        say(console, ["", *in_words("scaling", result)])
    if result.recommended is not None:
        from rich.syntax import Syntax  # noqa: PLC0415 - loads Pygments

        say(console, ["", "To train with it:"])
        code = code_to_paste(result, saved_as)
        # Wrapping at the width of the terminal would break it.
        console.print(Syntax("", "python").highlight("\n" + indent(code, "    ")), soft_wrap=True)


def code_to_paste(result: AutotuneResult, saved_as: Path) -> str:
    """Return the lines that train with the recommendation in the file ``saved_as``.

    What a result does not contain, such as weights or storage options, is left to be filled in.
    """
    dataset, strategy, chosen = result.dataset, result.strategy, result.recommended
    if dataset.loader and dataset.unit != "cells":
        settings = [f"{n}={value!r}" for n, value in chosen.configuration.items()] if chosen else []
        return f"loader = {dataset.loader}({', '.join(['...', *settings])})"
    if dataset.loader:
        configuration = repr(chosen.configuration) if chosen else "..."
        return (
            "from cellfeed_tuner import Configuration\n\n"
            f"loader = {dataset.loader}(...).open({configuration})"
        )
    labels, selection = list(dataset.labels), dataset.selection
    columns = [*labels, *(strategy.columns if strategy else ())]
    files = list(folder_of(dataset.paths))
    arguments = f"{(files if files[1:] else files[0])!r}, obs={list(dict.fromkeys(columns))!r}"
    if dataset.elements not in ((), ("X",)):
        arguments += f", elements={list(dataset.elements)!r}"
    if dataset.has_storage_options:
        arguments += ", storage_options=..."
    rows = ""
    if selection is not None:
        rows = f"collection.where({selection.where!r})" if selection.where else "rows"
    imported, how = "CellDataset, open_collection", f", indices={rows}" if rows else ""
    if strategy is not None and not strategy.is_made_again:
        imported = f"CellDataset, {strategy.name}, open_collection"
        block_size = chosen.configuration.block_size if chosen else None
        how = f", strategy={strategy.in_python(block_size, rows)}"
    how += ", dense=True" * dataset.dense
    n_ranks, loader = result.ranks.n_local, ["for minibatch in dataset.loader():"]
    if chosen is not None and chosen.configuration.num_workers:
        kept = "loader = dataset.loader(persistent_workers=True)  # they start once"
        loader = [kept, "for minibatch in loader:"]
    return "\n".join(
        [
            *([f"# torchrun --nproc-per-node {n_ranks} ..."] if n_ranks > 1 else []),
            f"from cellfeed import {imported}",
            "",
            f"collection = open_collection({arguments})  # and other columns that you train on",
            f"dataset = CellDataset.from_autotune(collection, {str(saved_as)!r}{how}, seed=0)",
            *loader,
            f"    ...  # minibatch.X, minibatch.obs[{labels[0]!r}], minibatch.rows",
        ]
    )
