"""All that ``autotune`` found, in one picture."""

import matplotlib as mpl
from matplotlib.figure import Figure

from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner.plots._heat_maps import draw_entropy, draw_throughput
from cellfeed_tuner.plots._style import STYLE, draw_caption
from cellfeed_tuner.plots._trade_off import draw_trade_off

__all__ = ["autotune_figure"]


def autotune_figure(result: AutotuneResult) -> Figure:
    """Draw what ``autotune`` found: throughput and entropy over the grid, and the trade-off."""
    with mpl.rc_context(STYLE):
        if result.ranges is None:
            figure = Figure(figsize=(14.5, 4.9), layout="constrained")
            speeds, entropies, trade_off = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
            draw_throughput(speeds, result)
            draw_entropy(entropies, result)
        else:  # which form no grid
            figure = Figure(figsize=(9.5, 4.9), layout="constrained")
            trade_off = figure.subplots()
        draw_trade_off(trade_off, result)
        figure.suptitle(_headline(result), x=0.01, ha="left", fontsize=11)
        draw_caption(figure, _caption(result))
    return figure


def _headline(result: AutotuneResult) -> str:
    if result.recommended is None:
        wrong = "the loader is wrong, so nothing is recommended"
        return f"autotune: {wrong if result.loader_fault else 'no configuration is feasible'}"
    chosen, speed = result.recommended.configuration, result.recommended.cells_per_second
    return (
        f"Recommended: {chosen}; {speed.value:,.0f} cells/s ({speed.low:,.0f} to {speed.high:,.0f})"
    )


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
