"""Record a grid from the command line."""

from collections import Counter
from pathlib import Path
from typing import Any

import click
from bench.backtest.files import facts_path
from bench.backtest.record import Recording, record

from cellfeed import open_collection
from cellfeed.console import ByteSize, OneLineErrorCommand, interrupted
from cellfeed_tuner._commands._autotune_cli import Sizes, listed
from cellfeed_tuner._commands._autotune_run import LiveDisplay
from cellfeed_tuner._constants import DEFAULT_BLOCK_SIZES, DEFAULT_FETCH_FACTORS

__all__ = ["record_command"]


@click.command("record", cls=OneLineErrorCommand)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--label", required=True, metavar="COLUMN", help="obs column to mix minibatches by.")
@click.option("--output", required=True, metavar="GRID.csv",
              type=click.Path(dir_okay=False, path_type=Path),
              help="File to write; an interrupted recording there continues.")  # fmt: skip
@click.option("--runs", default=3, show_default=True, type=click.IntRange(min=1),
              help="How often to measure the grid, each time in another order.")  # fmt: skip
@click.option("--element", "elements", default=("X",), show_default="X", multiple=True,
              metavar="NAME",
              help="Element to read, such as layers/counts; may be repeated.")  # fmt: skip
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1),
              help="Cells of a minibatch.")  # fmt: skip
@click.option("--block-sizes", default=DEFAULT_BLOCK_SIZES, type=Sizes(1),
              show_default=listed(DEFAULT_BLOCK_SIZES), help="Block sizes.")  # fmt: skip
@click.option("--fetch-factors", default=DEFAULT_FETCH_FACTORS, type=Sizes(1),
              show_default=listed(DEFAULT_FETCH_FACTORS), help="Fetch factors.")  # fmt: skip
@click.option("--workers", type=Sizes(0), show_default="0 and powers of two up to the cores",
              help="Numbers of worker processes.")  # fmt: skip
@click.option("--memory", type=ByteSize(), show_default="what is available",
              help="Most memory for buffers, such as 8GB.")  # fmt: skip
@click.option("--cache", default=None, show_default="cold", type=click.Choice(["cold", "warm"]),
              help="State of the page cache to measure in; not for files on servers.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the plans and the orders.")
@click.option("--note", default="", metavar="TEXT",
              help="A remark on the circumstances to store.")  # fmt: skip
def record_command(
    *, paths: tuple[str, ...], label: str, elements: tuple[str, ...], output: Path, **settings: Any
) -> None:
    """Measure the whole grid, to replay searches on it; this takes long.

    Each row of GRID.csv is one run of one configuration, written as soon as it is
    measured. GRID.json describes the circumstances. The same command continues an
    interrupted recording.
    """
    collection = open_collection(paths, obs=[label], elements=elements)
    try:
        with LiveDisplay() as display:
            recording = record(
                collection, label=label, output=output, on_progress=display.show, **settings
            )
    except KeyboardInterrupt:
        interrupted(
            f"Interrupted. {output} holds the measurements so far; the same command continues."
        )
    click.echo(_summary(recording))


def _summary(recording: Recording) -> str:
    n_measured = recording.n_configurations - len(recording.left_out)
    measured = f"{n_measured} of {recording.n_configurations} configurations"
    lines = [f"Measured {measured}, {recording.n_runs} times each, in {recording.seconds:,.0f} s."]
    reasons = Counter(why.partition(":")[0] for why in recording.left_out.values())
    lines += [f"Left out: {n} ({why})" for why, n in reasons.most_common()]
    return "\n".join([*lines, f"Wrote {recording.path}, {facts_path(recording.path)}"])
