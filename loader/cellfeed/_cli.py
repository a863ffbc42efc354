"""The ``cellfeed`` command. Results go to stdout, progress and errors to stderr."""

import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from cellfeed._version import __version__
from cellfeed.console import OneLineErrorGroup, format_bytes
from cellfeed.synthetic import write_tahoe_like

__all__ = ["main"]


@click.group(cls=OneLineErrorGroup)
@click.version_option(__version__, prog_name="cellfeed")
def main() -> None:
    """Feed minibatches from single-cell collections to a training loop."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--cells", required=True, type=int, help="Cells of the whole collection.")
@click.option("--seed", default=0, show_default=True, help="The content follows from it.")
@click.option("--genes", default=62_710, show_default=True, help="Genes.")
@click.option("--plates", default=14, show_default=True, help="Plates, one file each.")
@click.option("--overwrite", is_flag=True, help="Replace the plates that FOLDER holds.")
def synthesize(
    *, folder: Path, cells: int, seed: int, genes: int, plates: int, overwrite: bool
) -> None:
    """Write a collection that resembles Tahoe-100M into FOLDER."""
    start = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Writing cells", total=cells)
        paths = write_tahoe_like(
            folder,
            n_cells=cells,
            seed=seed,
            n_genes=genes,
            n_plates=plates,
            overwrite=overwrite,
            on_progress=lambda n_written: progress.update(task, completed=n_written),
        )
    size = format_bytes(sum(path.stat().st_size for path in paths))
    seconds = time.perf_counter() - start
    click.echo(f"{folder}: {len(paths)} files, {cells:,} cells, {size}, {seconds:.1f} s")
