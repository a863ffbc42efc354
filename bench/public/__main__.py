"""Other projects' benchmarks, with cellfeed in them: ``python -m bench.public COMMAND``."""

from functools import partial
from pathlib import Path
from typing import Any

import click
from bench.public import adapters, randomness

from cellfeed.console import OneLineErrorGroup


def _options(command: Any, **defaults: Any) -> Any:
    """Add the paths and the sizes that both benchmarks take."""
    for name, default in reversed(defaults.items()):
        sizes = click.IntRange(min=int(default > 0))
        command = click.option(f"--{name}", type=sizes, default=default, show_default=True)(command)
    path = click.Path(exists=True, path_type=Path)
    return click.argument("paths", nargs=-1, required=True, type=path)(command)


@click.group(cls=OneLineErrorGroup)
def main() -> None:
    """Run cellfeed in other projects' benchmarks."""


@main.command("randomness")
def randomness_command() -> None:
    """Print SLAF's scores of randomness for all strategies and sizes, as a table in Markdown."""
    click.echo(randomness.table())


@main.command("arrayloader")
@partial(_options, **{"batch-size": 4096, "block-size": 4, "fetch-factor": 16, "num-workers": 0})
@click.option("--n-samples", type=click.IntRange(min=1), default=2_000_000, show_default=True)
def arrayloader_command(paths: tuple[Path, ...], **settings: Any) -> None:
    """Time cellfeed by laminlabs/arrayloader-benchmarks, on .h5ad files or zarr stores."""
    speed, batch_size = adapters.run_arrayloader(paths, **settings)
    click.echo(f"cellfeed: {speed:,.0f} samples/s in minibatches of {batch_size:,}")


@main.command("scspeedtest")
@partial(_options, **{"batch-size": 64, "block-size": 16, "fetch-factor": 64, "num-workers": 0})
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0,
              show_default=True)  # fmt: skip
@click.option("--warmup", type=click.FloatRange(min=0), default=0.0, show_default=True,
              help="Seconds that are not timed.")  # fmt: skip
def scspeedtest_command(paths: tuple[Path, ...], **settings: Any) -> None:
    """Time cellfeed by NVIDIA's bionemo-scspeedtest, on .h5ad files or zarr stores.

    As root, scspeedtest empties the page cache of the whole machine.
    """
    result = adapters.run_scspeedtest(paths, **settings)
    click.echo(f"cellfeed: {result.samples_per_second:,.0f} samples/s")


if __name__ == "__main__":
    main(prog_name="python -m bench.public")
