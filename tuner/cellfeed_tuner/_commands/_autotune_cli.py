"""The ``autotune`` command. Results go to stdout, progress and errors to stderr."""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil

from cellfeed import __version__, open_collection
from cellfeed.console import ByteSize, interrupted
from cellfeed_tuner import _autotune
from cellfeed_tuner._commands._explain_cli import explain_command
from cellfeed_tuner._commands._live import LiveDisplay
from cellfeed_tuner._commands._record_cli import record_command
from cellfeed_tuner._commands._replay_cli import replay_command
from cellfeed_tuner._commands._show_cli import show_command
from cellfeed_tuner._commands._sizes import Sizes, listed
from cellfeed_tuner._commands._subcommands import CommandWithSubcommands
from cellfeed_tuner._grid import DEFAULT_BLOCK_SIZES, DEFAULT_FETCH_FACTORS
from cellfeed_tuner._interruption import AutotuneInterrupted
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._reports._code import code_to_paste
from cellfeed_tuner._reports._html_report import html_report
from cellfeed_tuner._reports._terminal import print_report
from cellfeed_tuner._results._autotune_result import AutotuneResult
from cellfeed_tuner._results._recommended import DEFAULT_ENTROPY_FLOOR
from cellfeed_tuner._results._replaced_file import replaced_file
from cellfeed_tuner.plots import autotune_figure

__all__ = ["main"]

# What takes longer has done something else before; and what is kept for the picture and the page.
_MOST_START_SECONDS, _WRITING_SECONDS = 15.0, 2.0
_LEAST_SHARE = 0.5


@click.command(cls=CommandWithSubcommands)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--label", required=True, multiple=True, metavar="COLUMN",
              help="obs column to mix minibatches by; may be given several times.")  # fmt: skip
@click.option("--given", metavar="COLUMN",
              help="obs column within whose values the first label is to be mixed.")  # fmt: skip
@click.option("--element", "elements", default=("X",), show_default="X", multiple=True,
              metavar="NAME",
              help="What is read, such as layers/counts; may be given several times.")  # fmt: skip
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1),
              help="Cells of a minibatch.")  # fmt: skip
@click.option("--block-sizes", default=DEFAULT_BLOCK_SIZES, type=Sizes(1),
              show_default=listed(DEFAULT_BLOCK_SIZES),
              help="Block sizes to try; 1:4096 is a range.")  # fmt: skip
@click.option("--fetch-factors", default=DEFAULT_FETCH_FACTORS, type=Sizes(1),
              show_default=listed(DEFAULT_FETCH_FACTORS),
              help="Fetch factors to try; 1:512 is a range.")  # fmt: skip
@click.option("--workers", type=Sizes(0), show_default="0 and powers of two up to the cores",
              help="Numbers of worker processes to try.")  # fmt: skip
@click.option("--budget", default=_autotune.DEFAULT_BUDGET_SECONDS, show_default=True,
              type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Time to spend, all in all.")  # fmt: skip
@click.option("--entropy-floor", default=DEFAULT_ENTROPY_FLOOR, show_default=True,
              type=click.FloatRange(0, 1),
              help="Least entropy, as a share of true random sampling's.")  # fmt: skip
@click.option("--memory", type=ByteSize(), show_default="what is available",
              help="Most memory to use, such as 8GB.")  # fmt: skip
@click.option("--need", type=click.FloatRange(min=0, min_open=True), metavar="CELLS_PER_S",
              help="Throughput that suffices; the best mixed is then chosen.")  # fmt: skip
@click.option("--step-ms", type=click.FloatRange(min=0, min_open=True), metavar="MS",
              help="How long training computes on a minibatch: what keeps up suffices, and the "
              "choice is measured with such a loop.")  # fmt: skip
@click.option("--cache", default="cold", show_default=True, type=click.Choice(["cold", "warm"]),
              help="State of the page cache to measure in.")  # fmt: skip
@click.option("--output", default=Path(), type=click.Path(file_okay=False, path_type=Path),
              help="Folder for autotune.json, autotune.png and autotune.html.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the plans.")
@click.option("--json", "as_json", is_flag=True,
              help="Print the result as JSON on stdout, and the report on stderr.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Ignore what earlier runs found.")
@click.version_option(__version__, prog_name="autotune")
def main(
    *,
    paths: tuple[str, ...],
    label: tuple[str, ...],
    given: str | None,
    elements: tuple[str, ...],
    step_ms: float | None,
    cache: CacheState,
    output: Path,
    as_json: bool,
    budget: float,
    **settings: Any,
) -> None:
    """Measure loaders of the AnnData files at PATH, and recommend the settings to train with.

    PATH is an .h5ad file, a folder of them, or a pattern; several make one collection. The
    throughput and the label entropy of minibatches are measured over a grid of block sizes,
    fetch factors and workers, or, of ranges, where a study proposes. Exits with 1 if no
    configuration is feasible or the loader delivers other cells than it should, and with 2 if the
    input cannot be used. Ctrl-C ends it with what was measured by then, and 130.
    """
    obs = [*label, given] if given else label
    collection = open_collection(paths, obs=list(dict.fromkeys(obs)), elements=elements)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output):
        pass  # whether files can be written there had better be known before measuring
    try:
        with LiveDisplay() as display:
            result = _autotune.autotune(
                collection,
                label=label,
                step_seconds=step_ms and step_ms / 1000,
                given=given,
                cache=cache,
                budget=_left_of(budget),
                on_progress=display.show,
                on_race=display.watch,
                **settings,
            )
    except AutotuneInterrupted as interruption:
        result = interruption.result
    print_report(result, output / "autotune.json", elements=elements, to_stderr=as_json)
    if as_json:  # before files, which a full disk does not take
        click.echo(json.dumps(result.to_json(), indent=1, allow_nan=False))
    written = ", ".join(map(str, _write(result, output, elements)))
    click.echo(f"\nWrote {written}", err=as_json)
    if result.interrupted:
        interrupted(f"Interrupted. {output / 'autotune.json'} holds what was measured by then.")
    if result.recommended is None:
        raise SystemExit(1)


main.add_command(record_command)
main.add_command(explain_command)
main.add_command(replay_command)
main.add_command(show_command)


def _left_of(budget: float) -> float:
    """Return what is left of a budget after the start of this program, and before its files."""
    age = time.time() - psutil.Process().create_time()
    spent = (age if age < _MOST_START_SECONDS else 0.0) + _WRITING_SECONDS
    return max(budget - spent, _LEAST_SHARE * budget)


def _write(result: AutotuneResult, output: Path, elements: Sequence[str]) -> list[Path]:
    """Write the result as JSON, picture and page, and return where."""
    as_json, picture, page = (output / f"autotune.{kind}" for kind in ("json", "png", "html"))
    result.save(as_json)
    with replaced_file(picture) as file:
        autotune_figure(result).savefig(file, format="png")
    paths = [Path(path) for path in result.dataset.paths]
    code = code_to_paste(paths, result.dataset.labels, as_json, elements=elements)
    text = html_report(result, code=code)
    with replaced_file(page) as file:
        file.write(text.encode())
    return [as_json, picture, page]
