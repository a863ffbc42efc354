"""Record the grids of bench/grids on this machine."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import click
import numpy as np
from bench.backtest.record import record_command

from cellfeed._cli import main as cellfeed
from cellfeed.machine import usable_cpu_count

FOLDER = Path(__file__).parents[1] / "grids"
N_DENSE_GENES, N_RUNS = 2000, 2


@contextmanager
def busy_cores(n: int) -> Iterator[None]:
    """Keep this many cores busy in the meantime."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(n)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def run(command: click.Command, *arguments: object) -> None:
    command.main([str(each) for each in arguments], standalone_mode=False)


def plates(folder: Path, n_cells: int) -> Path:
    path = folder / f"plates-{n_cells}"
    run(cellfeed, "synthesize", path, "--cells", n_cells)
    return path


def shuffled_store(folder: Path, n_cells: int) -> Path:
    path = folder / f"shuffled-{n_cells}.zarr"
    if not (path / "zarr.json").exists():  # written last
        run(cellfeed, "preshuffle", plates(folder, n_cells), path)
    return path


def rewritten(
    folder: Path, kind: str, n_cells: int, rewrite: Callable[[ad.AnnData, Path], None]
) -> Path:
    path = folder / f"{kind}-{n_cells}"
    path.mkdir(exist_ok=True)
    for plate in sorted(plates(folder, n_cells).glob("*.h5ad")):
        if not (path / plate.name).exists():
            rewrite(ad.read_h5ad(plate), path / plate.name)
    return path


def as_lzf(adata: ad.AnnData, path: Path) -> None:
    adata.write_h5ad(path, compression="lzf")


def as_dense(adata: ad.AnnData, path: Path) -> None:
    few = adata[:, :N_DENSE_GENES].copy()
    few.X = few.X.toarray()
    few.write_h5ad(path)


def every_other_plate(folder: Path, name: str, write: Callable[[ad.AnnData, Path], None]) -> Path:
    """Make a file or store from every second plate."""
    path = folder / name
    if not path.exists():
        paths = sorted(plates(folder, 28_000).glob("*.h5ad"))[::2]
        write(ad.concat([ad.read_h5ad(each) for each in paths], merge="same"), path)
    return path


def sorted_by_drug(adata: ad.AnnData, path: Path) -> None:
    order = np.lexsort([adata.obs[name].astype(str) for name in ("cell_line", "drug")])
    adata[order].copy().write_h5ad(path)


def in_random_order(adata: ad.AnnData, path: Path) -> None:
    order = np.random.default_rng(0).permutation(adata.n_obs)
    adata[order].copy().write_h5ad(path, compression="gzip")


def as_plain_zarr(adata: ad.AnnData, path: Path) -> None:
    adata[:, : 2 * N_DENSE_GENES].copy().write_zarr(path)


def scgen(folder: Path) -> Path:
    path = folder / "scgen_valid.h5ad"
    if not path.exists():
        sys.exit(f"{path} is missing; copy data/valid.h5ad of github.com/theislab/scgen there")
    return path


@dataclass(frozen=True)
class Grid:
    make: Callable[..., Path]
    arguments: tuple[Any, ...]
    options: tuple[str, ...]
    is_busy: bool = False


PLATES = ("--label", "plate")
BUSY = (*PLATES, "--note", "Another program kept each core busy.")
UP_TO_64 = ("--fetch-factors", "1,4,16,64")
FEW = ("--block-sizes", "4,16,64,256,1024", "--fetch-factors", "4,16,64", "--workers", "0,2")
PLAIN = (every_other_plate, ("plain.h5ad", sorted_by_drug))
GRIDS = {
    "gzip-28k": Grid(plates, (28_000,), PLATES),
    "gzip-28k-busy": Grid(plates, (28_000,), BUSY, is_busy=True),
    "gzip-200k": Grid(plates, (200_000,), PLATES),
    "lzf-28k-warm": Grid(rewritten, ("lzf", 28_000, as_lzf), (*PLATES, "--cache", "warm")),
    "dense-28k": Grid(rewritten, ("dense", 28_000, as_dense), PLATES),
    "zarr-200k": Grid(shuffled_store, (200_000,), (*PLATES, *UP_TO_64)),
    "zarr-200k-busy": Grid(shuffled_store, (200_000,), (*BUSY, *UP_TO_64), is_busy=True),
    "gzip-28k-cell-line": Grid(
        plates,
        (28_000,),
        (
            *("--label", "cell_line", "--cache", "warm", "--workers", "0,2"),
            *("--block-sizes", "4,16,64,256", "--fetch-factors", "4,16,64,256"),
        ),
    ),
    "plain-14k-drug": Grid(*PLAIN, ("--label", "drug", *FEW)),
    "plain-14k-busy": Grid(
        *PLAIN, ("--label", "drug", "--cache", "warm", *FEW, *BUSY[-2:]), is_busy=True
    ),
    "mixed-14k": Grid(every_other_plate, ("mixed.h5ad", in_random_order), (*PLATES, *FEW)),
    "zarr-14k-warm": Grid(
        *(every_other_plate, ("plain.zarr", as_plain_zarr)),
        ("--label", "cell_line", "--cache", "warm", *FEW),
    ),
    "scgen": Grid(scgen, (), ("--label", "cell_type", "--fetch-factors", "1,2,4,8,16")),
}


@click.command("grids")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("names", nargs=-1, metavar="[NAME...]")
def grids_command(*, folder: Path, names: tuple[str, ...]) -> None:
    """Record the grids of bench/grids again; an interrupted recording continues.

    Collections are written to FOLDER unless they exist.
    """
    for name in names or GRIDS:
        grid = GRIDS[name]
        path = grid.make(folder, *grid.arguments)
        with busy_cores(usable_cpu_count() if grid.is_busy else 0):
            output = FOLDER / f"{name}.csv"
            run(record_command, path, "--runs", N_RUNS, "--out", output, *grid.options)
