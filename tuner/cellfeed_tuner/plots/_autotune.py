"""A result in one picture, and the trade-off between throughput and entropy in its own."""

from collections.abc import Sequence
from math import ceil

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cellfeed_tuner._interval import interval
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner.plots._heat_maps import describe, draw_entropy, draw_throughput
from cellfeed_tuner.plots._style import (
    BOUND,
    CHOSEN,
    STYLE,
    around,
    block_colours,
    draw_caption,
    hover,
    scale_speeds,
)

__all__ = ["autotune_figure", "trade_off_figure"]

# The legend names at most this many block sizes.
_MOST_NAMED = 10
_WORKER_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def autotune_figure(result: AutotuneResult) -> Figure:
    """Draw a result: throughput and entropy over the grid, and their trade-off."""
    with mpl.rc_context(STYLE):
        if result.ranges is None:
            figure = Figure(figsize=(14.5, 4.9), layout="constrained")
            speeds, entropies, trade_off = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
            draw_throughput(speeds, result)
            draw_entropy(entropies, result)
        else:  # no grid
            figure = Figure(figsize=(9.5, 4.9), layout="constrained")
            trade_off = figure.subplots()
        _draw_trade_off(trade_off, result)
        trade_off.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
        figure.suptitle(_headline(result), x=0.01, ha="left", fontsize=11)
        draw_caption(figure, _caption(result))
    return figure


def trade_off_figure(result: AutotuneResult, *, caption: str = "") -> Figure:
    """Draw throughput against entropy, their Pareto front, and the recommended point."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 4.8), layout="constrained")
        axes = figure.subplots()
        _draw_trade_off(axes, result)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=8, ncols=3)
        draw_caption(figure, caption)
    return figure


def _draw_trade_off(axes: Axes, result: AutotuneResult) -> None:
    """Draw the measured configurations and their Pareto front, without a legend."""
    block_sizes = sorted({each.configuration.block_size for each in result.configurations})
    workers = sorted({each.configuration.num_workers for each in result.configurations})
    colours = block_colours(block_sizes)
    for each in result.configurations:
        speed = each.cells_per_second
        if speed is None:
            continue
        point = axes.errorbar(
            each.least_mixed.share_of_random,
            speed.value,
            xerr=around(each.least_mixed.expected, unit=each.least_mixed.random_alike or 1.0),
            yerr=around(speed),
            fmt=_marker(workers, each.configuration.num_workers),
            color=colours[each.configuration.block_size],
            mfc="white" if each.has_few_rounds else None,
            ms=5,
            lw=1,
        )
        point.lines[0].set_gid(hover(describe(each)))
    front = [
        (each.least_mixed.share_of_random, each.cells_per_second.value)
        for each in result.pareto_front()
        if each.cells_per_second is not None
    ]
    if front:
        axes.step(
            *zip(*front, strict=True), where="post", color=BOUND, lw=1, alpha=0.6, zorder=0,
            label="Pareto front",
        )  # fmt: skip
    floor = result.constraints.entropy_floor
    axes.axvline(floor, color=BOUND, ls="--", lw=1)
    axes.annotate(
        f"floor {floor:g}", (floor, 1), xycoords=("data", "axes fraction"), xytext=(-3, -3),
        textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8, color=BOUND,
    )  # fmt: skip
    chosen, recommended = result.chosen, result.recommended
    if chosen is not None and recommended is not None and recommended.cells_per_second is not None:
        share, speed = chosen.least_mixed.share_of_random, recommended.cells_per_second
        axes.errorbar(
            share, speed.value, yerr=around(speed), fmt="o", mfc="none", mec=CHOSEN, ecolor=CHOSEN,
            ms=13, mew=2, label="recommended",
        )  # fmt: skip
    axes.set_title("Trade-off, with 95 % intervals")
    of = "entropy of the label mixed least" if result.dataset.further_labels else "entropy"
    axes.set(xlabel=f"{of}, as a share of random sampling", ylabel="throughput (cells/s)")
    scale_speeds(axes)
    axes.yaxis.set_minor_locator(NullLocator())
    for size in block_sizes[:: ceil(len(block_sizes) / _MOST_NAMED)]:
        axes.plot([], [], "o", color=colours[size], label=f"block {size}")
    for number in workers:
        name = "1 worker" if number == 1 else f"{number} workers"
        axes.plot([], [], _marker(workers, number), color=BOUND, label=name)
    if any(each.has_few_rounds for each in result.configurations):
        axes.plot([], [], "o", color=BOUND, mfc="white", label="few rounds")


def _marker(workers: Sequence[int], number: int) -> str:
    return _WORKER_MARKERS[workers.index(number) % len(_WORKER_MARKERS)]


def _headline(result: AutotuneResult) -> str:
    if result.recommended is None:
        wrong = "the loader delivers wrong data, so nothing is recommended"
        return f"autotune: {wrong if result.loader_fault else 'no configuration is feasible'}"
    chosen, speed = result.recommended.configuration, result.recommended.cells_per_second
    if speed is None:
        return f"Recommended: {chosen} (predicted; nothing was measured)"
    predicted = " (predicted)" if result.recommended.basis == "predicted" else ""
    return f"Recommended: {chosen}; {interval(speed)} cells/s{predicted}"


def _caption(result: AutotuneResult) -> str:
    dataset, cpu = result.dataset, result.machine.cpu
    what = f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes, {dataset.layout}"
    if dataset.loader:
        what = f"{dataset.loader}, {dataset.n_cells:,} rows"
    labels = [f"label {dataset.label} ({dataset.n_labels} values)"]
    labels += [f"{name} ({each.n_labels})" for name, each in dataset.further_labels.items()]
    disks = sorted({storage.file_system or "unknown" for storage in result.machine.storage})
    where = f"{', '.join(disks)}, page cache {result.cache}"
    if result.cache == "remote":
        where = "files on a server"
    return (
        f"{what}, {', '.join(labels)}, minibatch {dataset.batch_size}; "
        f"{cpu.model or 'unknown processor'}, {cpu.usable_cores:g} cores, {where}"
    )
