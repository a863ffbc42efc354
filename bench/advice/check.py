"""Compare the advice of `autotune` with the result of following it.

``python bench/advice/check.py FOLDER`` tunes two collections of the same cells: in gzip as anndata
writes it, and in lzf with large chunks. It follows every advice: it writes the shuffled copy, or
the files with other chunks, and measures both in interleaved rounds, with the settings of the
advice. It compares the reported time for decompression with uncompressed files, from the page
cache.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np

from cellfeed import Collection, open_collection, preshuffle
from cellfeed.synthetic import write_tahoe_like
from cellfeed_tuner import AutotuneResult, Configuration, Estimate, StorageAdvice, autotune, measure
from cellfeed_tuner._interval import mean_with_interval

LARGE_CHUNK = 1 << 16  # elements
# Few and small, so that the stages can be timed even on a slow machine.
GRID: dict[str, Any] = {"block_sizes": [16], "fetch_factors": [64], "workers": [0]}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--cells", default=28_000, show_default=True)
@click.option("--budget", default=40.0, show_default=True, help="Seconds of each autotune run.")
@click.option("--rounds", default=6, show_default=True, help="Interleaved rounds.")
@click.option("--seconds", default=3.0, show_default=True, help="Seconds of each measurement.")
def main(folder: Path, cells: int, budget: float, rounds: int, seconds: float) -> None:
    """Write collections to FOLDER, and print what the advice promises and what was measured."""
    gzip = folder / "gzip"
    if not gzip.is_dir():
        write_tahoe_like(gzip, n_cells=cells)
    lzf, plain = (folder / name for name in ("lzf", "plain"))
    rewrite(gzip, lzf, compression="lzf", chunk=LARGE_CHUNK)
    rewrite(gzip, plain)
    click.echo("| collection | advice | promised | measured, in each round |")
    click.echo("|---|---|---|---|")
    for files in (gzip, lzf):
        for rows in (
            _advice(files, budget, rounds, seconds),
            _stage(files, plain, budget, rounds, seconds),
        ):
            for row in rows:
                click.echo(f"| {files.name} | {' | '.join(row)} |")


def rewrite(source: Path, to: Path, *, compression: str | None = None, chunk: int = 24_000) -> None:
    """Write files with the same cells, with another compression and other chunks."""
    if to.is_dir():
        return
    to.mkdir()
    for path in sorted(source.glob("*.h5ad")):
        with h5py.File(path) as old, h5py.File(to / path.name, "w") as new:
            new.attrs.update(old.attrs)
            for name in old:
                old.copy(name, new)
            for name in ("data", "indices"):
                values, attributes = old["X"][name][:], dict(old["X"][name].attrs)
                del new["X"][name]
                new["X"].create_dataset(
                    name, data=values, chunks=(min(chunk, values.size),), compression=compression
                ).attrs.update(attributes)


def _advice(files: Path, budget: float, rounds: int, seconds: float) -> Iterator[tuple[str, ...]]:
    collection = open_collection(files, obs=["plate"])
    result = autotune(collection, label="plate", budget=budget, **GRID)
    now = _chosen(result)
    if result.bottleneck is not None:
        click.echo(f"{files.name}: {result.bottleneck.sentence}", err=True)
    if not result.storage_advice:
        yield "no advice", "", ""
    for advice in result.storage_advice:
        then = replace(now, block_size=advice.block_size)
        copy = open_collection(_taken(advice, files, collection), obs=["plate"])
        ratio = _ratio((collection, now), (copy, then), "cold", rounds, seconds)
        yield advice.action, f"at least {advice.least_speedup:.2f}", _words(ratio)


def _taken(advice: StorageAdvice, files: Path, collection: Collection) -> Path:
    """Follow the advice, and return the path of the new store."""
    if advice.action == "preshuffle":
        shuffled = files.with_suffix(".zarr")
        return shuffled if shuffled.exists() else preshuffle(files, shuffled).path
    chunks = files.with_name(f"{files.name}-in-chunks-of-{advice.rows_per_chunk}")
    with h5py.File(collection.locations[0]) as file:
        elements, cells = file["X/data"].size, file["X/indptr"].size - 1
        compression = file["X/data"].compression
    rewrite(files, chunks, compression=compression, chunk=advice.rows_per_chunk * elements // cells)
    return chunks


def _stage(
    files: Path, plain: Path, budget: float, rounds: int, seconds: float
) -> Iterator[tuple[str, ...]]:
    """Yield files that need no decompression; both are in the page cache."""
    collection = open_collection(files, obs=["plate"])
    result = autotune(collection, label="plate", budget=budget, cache="warm", **GRID)
    now, found = _chosen(result), result.bottleneck
    if found is None:
        yield "no time for the stages", "", ""
        return
    click.echo(f"{files.name}: {found.sentence}", err=True)
    saving = next(each.saving for each in found.stages if each.name == "decompressing")
    none = open_collection(plain, obs=["plate"])
    ratio = _ratio((collection, now), (none, now), "warm", rounds, seconds)
    yield "without decompression", f"about {1 / (1 - saving):.2f}", _words(ratio)


def _chosen(result: AutotuneResult) -> Configuration:
    assert result.recommended is not None
    return result.recommended.configuration


def _ratio(
    one: tuple[Collection, Configuration],
    other: tuple[Collection, Configuration],
    cache: Any,
    rounds: int,
    seconds: float,
) -> Estimate:
    """Return how many times as fast the other is, measured in interleaved rounds."""
    logarithms = []
    for number in range(rounds):
        speeds = {}
        for which in ((0, 1), (1, 0))[number % 2]:
            collection, configuration = (one, other)[which]
            found = measure(collection, configuration, cache=cache, seconds=seconds, seed=number)
            speeds[which] = found.rough_cells_per_second
        logarithms.append(np.log(speeds[1] / speeds[0]))
    mean = mean_with_interval(logarithms)
    return Estimate(*np.exp([mean.value, mean.low, mean.high]).tolist())


def _words(ratio: Estimate) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


if __name__ == "__main__":
    main()
