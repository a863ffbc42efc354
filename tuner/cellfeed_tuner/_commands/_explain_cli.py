"""The ``autotune explain`` command."""

from pathlib import Path
from typing import Any

import click

from cellfeed.console import OneLineErrorCommand

__all__ = ["explain_command"]


@click.command("explain", cls=OneLineErrorCommand)
@click.argument("saved", metavar="[AUTOTUNE.json]", default=Path("autotune.json"),
                type=click.Path(dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--block-size", type=click.IntRange(min=1), help="Why not this block size?")
@click.option("--fetch-factor", type=click.IntRange(min=1), help="Why not this fetch factor?")
@click.option("--num-workers", type=click.IntRange(min=0), help="Why not so many workers?")
@click.option("--step-ms", type=click.FloatRange(min=0, min_open=True), metavar="MS",
              help="Time of your training step, which may be the bottleneck.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of words.")
def explain_command(*, saved: Path, **asked: Any) -> None:
    """Explain a result: why the choice, why nothing else, and where the time goes.

    AUTOTUNE.json is what autotune wrote. With a block size, a fetch factor or a number of
    workers, the best configuration that has them is held against the choice.
    """
    from cellfeed_tuner._commands._explain_report import explain  # noqa: PLC0415

    explain(saved, **asked)
