"""The ``cellfeed`` command. Results go to stdout, progress and errors to stderr.

Each command imports its implementation when it runs, so that help appears immediately.
"""

import importlib
import pkgutil
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click

import cellfeed
from cellfeed.console import ByteSize, OneLineErrorGroup, format_bytes, interrupted
from cellfeed.extending import ProgressLine

__all__ = ["main"]

_STAGES = {"write": "Writing cells", "check": "Checking parts"}


@click.group(cls=OneLineErrorGroup)
@click.version_option(cellfeed.__version__, prog_name="cellfeed")
def main() -> None:
    """Feed minibatches from single-cell collections to a training loop."""


@main.command()
@click.argument("folder", type=click.Path())
@click.option("--cells", required=True, type=int, help="Number of cells in the collection.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random content.")
@click.option("--genes", default=62_710, show_default=True, help="Number of genes.")
@click.option("--plates", default=14, show_default=True, help="Number of plates, one file each.")
def synthesize(*, folder: str, cells: int, seed: int, genes: int, plates: int) -> None:
    """Write a collection that resembles Tahoe-100M into FOLDER."""
    from cellfeed import synthetic  # noqa: PLC0415

    start = time.perf_counter()
    with ProgressLine() as line:
        paths = synthetic.write_tahoe_like(
            folder,
            n_cells=cells,
            seed=seed,
            n_genes=genes,
            n_plates=plates,
            on_progress=lambda n_written: line.show_share("Writing cells", n_written, cells),
        )
    size = format_bytes(sum(path.stat().st_size for path in paths))
    seconds = time.perf_counter() - start
    click.echo(f"{folder}: {len(paths)} files, {cells:,} cells, {size}, {seconds:.1f} s")


@main.command()
@click.argument("paths", nargs=-1, required=True, metavar="IN...")
@click.argument("out", type=click.Path())
@click.option("--elements", metavar="NAMES", show_default="X; those of OUT with --append",
              help="Elements to write, such as X,layers/counts,obsm/X_pca; or all.")  # fmt: skip
@click.option("--in-order", is_flag=True, help="Keep the order of the cells.")
@click.option("--group-by", metavar="NAMES",
              help="obs columns, such as cell_line,drug, by which the cells of each part are "
              "sorted.")  # fmt: skip
@click.option("--append", is_flag=True, help="Add the cells to the store OUT, as new parts.")
@click.option("--mix", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="With --append: shuffle the cells of each new part with those of N parts of "
              "OUT, which are replaced.")  # fmt: skip
@click.option("--join-vars", type=click.Choice(["same", "inner", "outer"]), default="same",
              show_default=True, help="Genes to write if files differ: those of all files, or of "
              "any.")  # fmt: skip
@click.option("--where", metavar="CONDITION",
              help="Only cells whose obs fulfil it, such as \"drug == 'drug_001'\".")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the random order.")
@click.option("--block-size", type=click.IntRange(min=1), show_default="from the files' chunks",
              help="Cells read together; smaller blocks mix better, larger ones are faster."
              )  # fmt: skip
@click.option("--memory", type=ByteSize(), default=4_000_000_000, show_default="4GB",
              help="Memory for buffers; more memory makes fewer parts."
              )  # fmt: skip
@click.option("--codec", type=click.Choice(["delta", "annbatch"]),
              show_default="delta; that of OUT with --append",
              help="Encoding of sparse rows; annbatch reads both, and the second one faster."
              )  # fmt: skip
@click.option("--cells-per-chunk", type=click.IntRange(min=1), default=64, show_default=True,
              help="Smaller chunks make single cells faster to read, and OUT larger."
              )  # fmt: skip
@click.option("--scheduler", metavar="ADDRESS",
              help="Address of a Dask scheduler, whose workers then write.")  # fmt: skip
def preshuffle(
    *,
    paths: tuple[str, ...],
    out: str,
    elements: str | None,
    group_by: str | None,
    **options: Any,
) -> None:
    """Write the cells of IN... to OUT, shuffled or in order: a zarr store of AnnData groups.

    The name of OUT usually ends in .zarr. To resume after an interruption, run the same command
    again.
    """
    from cellfeed import preshuffle as write_preshuffled  # noqa: PLC0415

    try:
        with ProgressLine() as line:
            done = write_preshuffled(
                paths,
                out,
                elements=elements if elements in (None, "all") else elements.split(","),
                group_by=None if group_by is None else group_by.split(","),
                on_progress=lambda stage, *shares: line.show_share(_STAGES[stage], *shares),
                **options,
            )
    except KeyboardInterrupt:
        interrupted("Stopped; run the same command again to resume after the last complete part.")
    click.echo(
        f"{out}: {done.n_cells:,} cells in {_parts(done.n_parts)} "
        f"({done.n_parts_written} written), {format_bytes(done.n_bytes)}, {done.seconds:.1f} s"
    )


@main.command("warm-up")
def warm_up() -> None:
    """Compile all code for this processor now, so that no first minibatch waits for it.

    For images of containers and for clusters: run it once where the installation is writable, or
    set NUMBA_CACHE_DIR to a folder that all share. Processors of another kind compile again.
    """
    import numpy as np  # noqa: PLC0415

    from cellfeed.decode import kernels  # noqa: PLC0415
    from cellfeed.extending import compile_everything  # noqa: PLC0415

    start = time.perf_counter()
    for name in _modules_of_kernels(cellfeed.__path__, "cellfeed."):
        importlib.import_module(name)
    with ProgressLine() as line:
        compile_everything(lambda n, total: line.show_share("Compiling", n, total))
        kernels.cast_address(np.dtype(np.int64), np.dtype(np.int32), of_indices=True)
        for stored in map(np.dtype, ("f8", "i4", "i8", "u1", "u2", "u4", "u8", "?")):
            kernels.cast_address(stored, np.dtype(np.float32))
    seconds = time.perf_counter() - start
    click.echo(f"compiled for this processor in {seconds:.1f} s; first minibatches need not")


def _modules_of_kernels(paths: Iterable[str], prefix: str) -> Iterator[str]:
    """Yield the names of the modules of compiled code, ``_kernels``, in folders of a package."""
    for each in pkgutil.iter_modules(paths, prefix):
        if "_kernels" in each.name:
            yield each.name
        if each.ispkg:
            folder = each.name.rpartition(".")[2]
            yield from _modules_of_kernels([f"{path}/{folder}" for path in paths], f"{each.name}.")


def _parts(n: int) -> str:
    return "1 part" if n == 1 else f"{n} parts"
