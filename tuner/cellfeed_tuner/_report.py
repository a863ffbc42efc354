"""What ``autotune`` prints."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from textwrap import indent

from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from cellfeed_tuner._code import code_to_paste
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._result import AutotuneResult, ConfigurationResult
from cellfeed_tuner._storage import Storage

__all__ = ["print_report"]

_WIDTH_WITHOUT_TERMINAL = 100
_MOST_REMARKS = 3


def print_report(result: AutotuneResult, saved_as: Path, *, layer: str | None = None) -> None:
    """Print the grid, the recommendation with its reason, and the code to paste.

    Parameters
    ----------
    result
        What ``autotune`` found.
    saved_as
        Where the result was written, for the code.
    layer
        The layer that was read, for the code.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    console.print(_setting(result), _grid(result), _recommendation(result), sep="\n")
    if result.recommended is not None:
        paths = [Path(path) for path in result.dataset.paths]
        code = code_to_paste(paths, result.dataset.label, saved_as, layer=layer)
        # Not wrapped at the width of the terminal, which would break it.
        console.print(Syntax("", "python").highlight("\n" + indent(code, "    ")), soft_wrap=True)


def _setting(result: AutotuneResult) -> RenderableType:
    cpu, memory = result.machine.cpu, result.machine.memory
    lines = [
        *_dataset_lines(result),
        (
            f"{cpu.model or 'unknown processor'}, {cpu.usable_cores:g} cores, "
            f"{memory.available_bytes / 1e9:,.1f} GB available"
        ),
        *(_storage_line(storage) for storage in result.machine.storage),
        _cache_line(result),
    ]
    return Text("\n".join(lines) + "\n")


def _dataset_lines(result: AutotuneResult) -> list[str]:
    dataset, entropy = result.dataset, result.configurations[0].entropy_bits
    missing = f", missing in {dataset.n_missing:,} cells" if dataset.n_missing else ""
    return [
        (
            f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes in {len(dataset.paths)} "
            f"file(s), {dataset.bytes_on_disk / 1e6:,.0f} MB, {dataset.layout}, "
            f"{dataset.rows_per_chunk:,.1f} cells per chunk"
        ),
        (
            f"label {dataset.label}: {dataset.n_labels} values, "
            f"{dataset.label_entropy_bits:.3f} bits{missing}; minibatches of "
            f"{dataset.batch_size}, random sampling gives {entropy.random:.3f} bits"
        ),
    ]


def _storage_line(storage: Storage) -> str:
    speeds = ", ".join(
        f"{kind} reads {speed.bytes_per_second / 1e6:,.0f} MB/s"
        for kind, speed in (("sequential", storage.sequential), ("random", storage.random))
        if speed is not None
    )
    return (
        f"{storage.file_system or 'unknown file system'} on {storage.device or 'unknown'}: "
        f"{speeds or storage.note or 'read speed unknown'}"
    )


def _cache_line(result: AutotuneResult) -> str:
    said = {
        "cold": "page cache: cold, dropped before every round, as where files exceed memory",
        "warm": "page cache: warm, all files read beforehand",
        "unknown": "page cache: unknown, since the kernel kept pages that were to be dropped",
    }[result.cache]
    fits = result.dataset.bytes_on_disk < result.machine.memory.available_bytes / 2
    if result.cache == "cold" and fits:
        said += "\n(these files fit in memory: see --cache warm for epochs after the first)"
    return said


def _grid(result: AutotuneResult) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("block\nsize", justify="right", no_wrap=True)
    table.add_column("fetch\nfact.", justify="right", no_wrap=True)
    table.add_column("wor-\nkers", justify="right", no_wrap=True)
    table.add_column("cells/s\n[95 % interval]", justify="right", no_wrap=True)
    table.add_column("meas.\nbits", justify="right", no_wrap=True)
    table.add_column("exp.\nbits", justify="right", no_wrap=True)
    table.add_column("of\nrand.", justify="right", no_wrap=True)
    table.add_column("bounds\n(bits)", justify="right", no_wrap=True)
    table.add_column("within\nthem", justify="right", no_wrap=True)
    table.add_column("\nMB", justify="right", no_wrap=True)
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
    entropy, speed = first.entropy_bits, first.cells_per_second
    workers = [each.configuration.num_workers for each in rows]
    return [
        str(first.configuration.block_size),
        str(first.configuration.fetch_factor),
        str(workers[0]) if len(workers) == 1 else f"{workers[0]}-{workers[-1]}",
        first.status if speed is None else _interval(speed),
        "" if entropy.measured is None else f"{entropy.measured.value:.2f}",
        f"{entropy.expected.value:.2f}",
        f"{entropy.share_of_random:.0%}",
        f"{entropy.lower_bound:.2f}-{entropy.upper_bound:.2f}",
        entropy.verdict,
        f"{first.peak_memory_bytes / 1e6:,.0f}" if first.peak_memory_bytes else "",
    ]


def _interval(speed: Estimate) -> str:
    return f"{speed.value:,.0f} [{speed.low:,.0f}, {speed.high:,.0f}]"


def _style(result: ConfigurationResult) -> str:
    return "" if result.status == "measured" else "dim"


def _recommendation(result: AutotuneResult) -> RenderableType:
    chosen = result.recommended
    if chosen is None:
        return _nothing_feasible(result)
    speed = chosen.cells_per_second
    how = (
        "measured afresh"
        if chosen.measured_afresh
        else "as searched, could not be measured afresh in time"
    )
    untimed = sum(each.status == "out of budget" for each in result.configurations)
    lines = [
        Text(f"\nRecommended: {chosen.configuration}", style="bold green"),
        Text(f"{_interval(speed)} cells/s, {how}; {chosen.peak_memory_bytes / 1e6:,.0f} MB"),
        Text(chosen.reason),
        *_proof(result),
    ]
    lines += _remarks(result)
    if untimed:
        lines.append(
            Text(f"{untimed} configurations were not timed for want of budget (see --budget).")
        )
    return Group(*lines, Text("\nTo train with it:"))


def _proof(result: AutotuneResult) -> list[Text]:
    """Say what the entropy of the choice proves, which loaders are wrong, and what is shuffled."""
    chosen = result.recommended and result.recommended.configuration
    judged = [(each.configuration, each.verdict) for each in result.configurations if each.verdict]
    lines = [
        Text(f"{configuration}: {verdict.sentence}", style="bold red")
        for configuration, verdict in judged
        if verdict.kind == "loader"
    ][:_MOST_REMARKS]
    lines += [
        Text(verdict.sentence)
        for configuration, verdict in judged
        if configuration == chosen and verdict.kind != "loader"
    ]
    if result.storage_order is not None and result.storage_order.already_shuffled:
        lines.append(Text(result.storage_order.sentence))
    return lines


def _remarks(result: AutotuneResult) -> list[Text]:
    """Say of configurations that failed or do not fit what the grid has no room for."""
    return [
        Text(f"{each.configuration} {each.status}: {each.note}", style="dim")
        for each in result.configurations
        if each.status in {"failed", "over memory"}
    ][:_MOST_REMARKS]


def _nothing_feasible(result: AutotuneResult) -> RenderableType:
    headline = Text("\nNo configuration is feasible.", style="bold red")
    if result.nearest is None:
        reasons = {each.note or each.status for each in result.configurations}
        return Group(headline, Text(f"None could be timed: {'; '.join(sorted(reasons)[:3])}."))
    return Group(
        headline,
        *_remarks(result),
        *_proof(result),
        Text(f"Nearest is {result.nearest.configuration}, but {result.nearest.problem}."),
    )
