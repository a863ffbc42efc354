"""Other projects' benchmarks, with cellfeed in them: ``python -m bench.public COMMAND``."""

from pathlib import Path
from typing import Any

import click
from bench.public import adapters, randomness

from cellfeed.console import OneLineErrorGroup

PATHS = click.argument(
    "paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)


def _sizes(batch_size: int, block_size: int, fetch_factor: int) -> Any:
    positive = click.IntRange(min=1)

    def decorate(command: Any) -> Any:
        for option in (
            click.option("--num-workers", type=click.IntRange(min=0), default=0, show_default=True),
            click.option("--fetch-factor", type=positive, default=fetch_factor, show_default=True),
            click.option("--block-size", type=positive, default=block_size, show_default=True),
            click.option("--batch-size", type=positive, default=batch_size, show_default=True),
        ):
            command = option(command)
        return command

    return decorate


@click.group(cls=OneLineErrorGroup)
def main() -> None:
    """Run cellfeed in other projects' benchmarks."""


@main.command("randomness")
def randomness_command() -> None:
    """Print SLAF's scores of randomness for all strategies and sizes, as a table in Markdown."""
    click.echo(randomness.table())


@main.command("arrayloader")
@PATHS
@_sizes(batch_size=4096, block_size=4, fetch_factor=16)
@click.option("--n-samples", type=click.IntRange(min=1), default=2_000_000, show_default=True)
def arrayloader_command(paths: tuple[Path, ...], **settings: Any) -> None:
    """Time cellfeed by laminlabs/arrayloader-benchmarks, on .h5ad files or zarr stores."""
    speed, batch_size = adapters.run_arrayloader(paths, **settings)
    click.echo(f"cellfeed: {speed:,.0f} samples/s in minibatches of {batch_size:,}")


@main.command("scspeedtest")
@PATHS
@_sizes(batch_size=64, block_size=16, fetch_factor=64)
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
