"""The ``autotune`` command. Results go to stdout, progress and errors to stderr."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cellfeed import __version__, open_collection
from cellfeed.console import ByteSize
from cellfeed_tuner import _autotune
from cellfeed_tuner._page_cache import CacheState
from cellfeed_tuner._replay_cli import replay_command
from cellfeed_tuner._report import print_report
from cellfeed_tuner._subcommands import CommandWithSubcommands
from cellfeed_tuner.plots import autotune_figure

__all__ = ["main"]

_STAGES = {
    "machine": "Looking at the machine",
    "entropy": "Computing label entropy",
    "start": "Starting the measuring process",
    "throughput": "Measuring throughput",
}


class _Sizes(click.ParamType[tuple[int, ...]]):
    """Integers, separated by commas or blanks."""

    name = "N,N,..."

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        texts = re.split(r"[,\s]+", str(value).strip(", "))
        if not all(re.fullmatch(r"-?\d+", text) for text in texts):
            self.fail(f"{value!r} are not integers; write them as 4,16,64", param, ctx)
        sizes = tuple(int(text) for text in texts)
        if min(sizes) < self._least:
            self.fail(f"{min(sizes)} is below {self._least}, the least there may be", param, ctx)
        return sizes


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


@click.command(cls=CommandWithSubcommands)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--label", required=True, metavar="COLUMN", help="obs column to mix minibatches by.")
@click.option("--layer", help="Layer to read in place of X.")
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1),
              help="Cells of a minibatch.")  # fmt: skip
@click.option("--block-sizes", default=_autotune.DEFAULT_BLOCK_SIZES, type=_Sizes(1),
              show_default=_listed(_autotune.DEFAULT_BLOCK_SIZES),
              help="Block sizes to try.")  # fmt: skip
@click.option("--fetch-factors", default=_autotune.DEFAULT_FETCH_FACTORS, type=_Sizes(1),
              show_default=_listed(_autotune.DEFAULT_FETCH_FACTORS),
              help="Fetch factors to try.")  # fmt: skip
@click.option("--workers", type=_Sizes(0), show_default="0 and powers of two up to the cores",
              help="Numbers of worker processes to try.")  # fmt: skip
@click.option("--budget", default=_autotune.DEFAULT_BUDGET_SECONDS, show_default=True,
              type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Time to spend on measuring.")  # fmt: skip
@click.option("--entropy-floor", default=0.95, show_default=True, type=click.FloatRange(0, 1),
              help="Least entropy, as a share of true random sampling's.")  # fmt: skip
@click.option("--memory", type=ByteSize(), show_default="what is available",
              help="Most memory to use, such as 8GB.")  # fmt: skip
@click.option("--need", type=click.FloatRange(min=0, min_open=True), metavar="CELLS_PER_S",
              help="Throughput that suffices; the best mixed is then chosen.")  # fmt: skip
@click.option("--cache", default="cold", show_default=True, type=click.Choice(["cold", "warm"]),
              help="State of the page cache to measure in.")  # fmt: skip
@click.option("--output", default=Path(), type=click.Path(file_okay=False, path_type=Path),
              help="Folder for autotune.json and autotune.png.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the plans.")
@click.version_option(__version__, prog_name="autotune")
def main(
    *,
    paths: tuple[str, ...],
    label: str,
    layer: str | None,
    cache: CacheState,
    output: Path,
    **settings: Any,
) -> None:
    """Measure loaders of the AnnData files at PATH, and recommend the settings to train with.

    PATH is an .h5ad file, a folder of them, or a pattern; several make one collection. The
    throughput and the label entropy of minibatches are measured over a grid of block sizes,
    fetch factors and workers. Exits with 1 if no configuration is feasible, and with 2 if the
    input cannot be used.
    """
    collection = open_collection(paths, obs=[label], layer=layer)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output):
        pass  # whether files can be written there had better be known before measuring
    with _Bars() as bars:
        result = _autotune.autotune(
            collection, label=label, cache=cache, on_progress=bars.show, **settings
        )
    print_report(result, output / "autotune.json", layer=layer)
    result.save(output / "autotune.json")
    autotune_figure(result).savefig(output / "autotune.png")
    click.echo(f"\nWrote {output / 'autotune.json'} and {output / 'autotune.png'}")
    if result.recommended is None:
        raise SystemExit(1)


main.add_command(replay_command)


class _Bars:
    """Progress bars on stderr: one line for each stage where it is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks = dict[str, Any]()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, stage: str, done: float, total: float) -> None:
        """Show how far a stage has come."""
        if stage not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, completed=float("inf"), visible=False)
            self._tasks[stage] = self._bars.add_task(_STAGES[stage], total=total)
            if not self._console.is_terminal:
                self._console.print(f"{_STAGES[stage]} ...")
        self._bars.update(self._tasks[stage], completed=done, total=total)
