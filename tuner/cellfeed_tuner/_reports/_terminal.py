"""What ``autotune`` prints."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import indent

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from cellfeed_tuner._reports._code import code_to_paste
from cellfeed_tuner._reports._console import report_console
from cellfeed_tuner._reports._speed_interval import interval
from cellfeed_tuner._reports._wording import (
    busy_in_words,
    cache_in_words,
    cache_name,
    drifts_in_words,
    explained_in_words,
    few_rounds_in_words,
    how_measured,
    interruption_in_words,
    labels_in_words,
    loader_faults,
    missing_in_words,
    mixing_in_words,
    prefetch_in_words,
    proof_of_choice,
    ranges_in_words,
    rivals_in_words,
    storage_in_words,
    throughput,
    untimed_in_words,
    use_in_words,
    why_no_choice,
    why_nothing,
)
from cellfeed_tuner._results._autotune_result import AutotuneResult
from cellfeed_tuner._results._configuration_result import ConfigurationResult

__all__ = ["print_report"]

_MOST_REMARKS = 3
_TWO_DIGITS = 10


def print_report(
    result: AutotuneResult,
    saved_as: Path,
    *,
    elements: Sequence[str] = ("X",),
    to_stderr: bool = False,
) -> None:
    """Print the grid, the recommendation with its reason, and the code to paste.

    Parameters
    ----------
    result
        What ``autotune`` found.
    saved_as
        Where the result was written, for the code.
    elements
        What was read, for the code.
    to_stderr
        Whether stdout is for something else.
    """
    console = report_console(to_stderr=to_stderr, width=100)
    notes = map(Text, few_rounds_in_words(result.configurations))
    console.print(
        *_alarm(result),
        _setting(result),
        _grid(result),
        *notes,
        _recommendation(result),
        sep="\n",
    )
    if result.recommended is not None:
        dataset = result.dataset
        code = code_to_paste(
            dataset.paths,
            dataset.labels,
            saved_as,
            elements=elements,
            selection=dataset.selection,
            strategy=result.strategy,
            block_size=result.recommended.configuration.block_size,
            has_storage_options=dataset.has_storage_options,
        )
        # Not wrapped at the width of the terminal, which would break it.
        console.print(Syntax("", "python").highlight("\n" + indent(code, "    ")), soft_wrap=True)


def _alarm(result: AutotuneResult) -> list[RenderableType]:
    """Say before all else that the loader is wrong, if it is."""
    if result.loader_fault is None:
        return []
    headline = Text(f"\n{why_no_choice(result)}", style="bold red reverse")
    faults = [Text(fault, style="bold red") for fault in loader_faults(result)]
    return [Group(headline, *faults, "")]


def _setting(result: AutotuneResult) -> RenderableType:
    cpu, memory = result.machine.cpu, result.machine.memory
    lines = [
        *_dataset_lines(result),
        (
            f"{cpu.model or 'unknown processor'}, {cpu.usable_cores:g} cores, "
            f"{memory.available_bytes / 1e9:,.1f} GB available"
        ),
        *(storage_in_words(storage) for storage in result.machine.storage),
        f"{cache_name(result)}: " + "\n".join(cache_in_words(result)),
        *([result.earlier.sentence] if result.earlier else []),
    ]
    return Text("\n".join(lines) + "\n")


def _dataset_lines(result: AutotuneResult) -> list[str]:
    dataset = result.dataset
    return [
        (
            f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes in {len(dataset.paths)} "
            f"file(s), {dataset.bytes_on_disk / 1e6:,.0f} MB, {dataset.layout}, "
            f"{dataset.rows_per_chunk:,.1f} cells per chunk"
        ),
        *([f"of which {dataset.selection.in_words} are visited"] if dataset.selection else []),
        *([f"visited by {result.strategy.in_python()}"] if result.strategy else []),
        *filter(None, [dataset.slow_reading]),
        *labels_in_words(result),
    ]


def _grid(result: AutotuneResult) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("block\nsize", justify="right", no_wrap=True)
    table.add_column("fetch\nfact.", justify="right", no_wrap=True)
    table.add_column("wor-\nkers", justify="right", no_wrap=True)
    table.add_column("cells/s\n[95 % interval]", justify="right", no_wrap=True)
    table.add_column("meas.\nbits", justify="right", no_wrap=True)
    table.add_column("exp.\nbits", justify="right", no_wrap=True)
    share = "least\nshare" if result.dataset.further_labels else "of\nrand."
    table.add_column(share, justify="right", no_wrap=True)
    table.add_column("bounds\n(bits)", justify="right", no_wrap=True)
    table.add_column("within\nthem", justify="right", no_wrap=True)
    table.add_column("mem.\nGB", justify="right", no_wrap=True)
    chosen = result.recommended and result.recommended.configuration
    for rows in _alike(result.configurations):
        is_chosen = rows[0].configuration == chosen
        style = "bold green" if is_chosen else _style(rows[0])
        table.add_row(*_row(rows), style=style)
    return table


def _alike(results: Iterable[ConfigurationResult]) -> list[list[ConfigurationResult]]:
    """Put configurations that were not timed, and differ in workers only, into one row."""

    def key(each: ConfigurationResult) -> tuple[object, ...]:
        settings = each.configuration.block_size, each.configuration.fetch_factor
        ran = each.peak_memory_bytes is not None
        return (*settings, each.configuration.num_workers if ran else each.status)

    return [list(rows) for _, rows in groupby(results, key)]


def _row(rows: list[ConfigurationResult]) -> list[str]:
    first = rows[0]
    entropy = first.entropy_bits
    workers = [each.configuration.num_workers for each in rows]
    return [
        str(first.configuration.block_size),
        str(first.configuration.fetch_factor),
        str(workers[0]) if len(workers) == 1 else f"{workers[0]}-{workers[-1]}",
        throughput(first, shorten=True) or first.status,
        "" if entropy.measured is None else _short(entropy.measured.value),
        _short(entropy.expected.value),
        f"{first.least_mixed.share_of_random:.0%}",
        "-".join(map(_short, entropy.bounds)),
        entropy.verdict,
        _short(first.peak_memory_bytes / 1e9) if first.peak_memory_bytes else "",
    ]


def _short(value: float) -> str:
    """Return a figure of four characters, if it is below 100, or of five."""
    return f"{value:.2f}" if round(value, 2) < _TWO_DIGITS else f"{value:.1f}"


def _style(result: ConfigurationResult) -> str:
    return "" if result.status == "measured" else "dim"


def _recommendation(result: AutotuneResult) -> RenderableType:
    chosen = result.recommended
    if chosen is None:
        return _nothing_feasible(result)
    speed, memory = chosen.cells_per_second, chosen.peak_memory_bytes
    lines = [
        Text(f"\nRecommended: {chosen.settings}", style="bold green"),
        *_interruption(result),
        Text(f"{interval(speed)} cells/s, {how_measured(result)}; {memory / 1e6:,.0f} MB"),
        Text(chosen.reason),
        *map(Text, rivals_in_words(chosen)),
        *map(Text, prefetch_in_words(result)),
        *map(Text, use_in_words(result)),
        *map(Text, mixing_in_words(result)),
        *_proof(result),
        *_remarks(result),
        *map(Text, explained_in_words(result)),
        *map(Text, ranges_in_words(result)),
        *map(Text, untimed_in_words(result)),
    ]
    return Group(*lines, Text("\nTo train with it:"))


def _proof(result: AutotuneResult) -> list[Text]:
    """Say what the entropy of the choice proves, and what to beware of."""
    warnings = [*missing_in_words(result), *drifts_in_words(result), *busy_in_words(result)]
    said = [Text(each, style="bold yellow") for each in warnings]
    return [*map(Text, proof_of_choice(result)), *said]


def _interruption(result: AutotuneResult) -> list[Text]:
    return [Text(each, style="bold yellow") for each in interruption_in_words(result)]


def _remarks(result: AutotuneResult) -> list[Text]:
    """Say of configurations that ran, failed or do not fit what the grid has no room for."""
    return [
        Text(f"{each.configuration} {each.status}: {each.note}", style="dim")
        for each in result.configurations
        if each.note and each.status in {"measured", "not enough samples", "failed", "over memory"}
    ][:_MOST_REMARKS]


def _nothing_feasible(result: AutotuneResult) -> RenderableType:
    headline = Text(f"\n{why_no_choice(result)}", style="bold red")
    if result.nearest is None:
        return Group(headline, *_interruption(result), Text(why_nothing(result)))
    said = [*ranges_in_words(result), why_nothing(result)]
    return Group(
        headline, *_interruption(result), *_remarks(result), *_proof(result), *map(Text, said)
    )
