"""Compare cellfeed with cellstream's own `gather_rows` on one archive: cells/s, in turns.

Run from the root of the repository, as ``python -m bench.cellstream.compare ARCHIVE``, or with a
folder of .h5ad files, which it converts first and times. Each turn reads for a second: random
cells, as drawn or sorted, with `gather_rows`; and minibatches of as many cells with `CellDataset`,
from the archive, or from other stores of the same cells. The page cache is warm; with ``--cold``,
the pages are dropped before each turn. Compare ratios, not absolute figures.
"""

import argparse
import itertools
import time
import warnings
from functools import partial
from pathlib import Path

import cellstream
import numpy as np
from bench._turns import drop, in_turns, say
from cellstream.cell import concat_cell_archives, write_cell_archive

from cellfeed import BlockShuffling, CellDataset, open_collection


def gather(path, size, threads, *, is_sorted, seed):
    store = cellstream.open(path)
    random = np.random.default_rng(seed)
    while True:
        rows = random.integers(0, store.n_obs, size)
        cells = store.gather_rows(np.sort(rows) if is_sorted else rows, n_threads=threads)
        yield len(cells.indptr) - 1


def minibatches(path, size, threads, *, block_size, fetch, seed):
    dataset = CellDataset(
        open_collection(path),
        BlockShuffling(block_size),
        batch_size=size,
        fetch_factor=max(1, fetch // size),
        num_threads=threads,
        seed=seed,
    )
    while True:
        for minibatch in dataset:
            yield len(minibatch.rows)


def rates_of(read, path, options, seed):
    """Return cells/s, and cells per second of processor time."""
    n, delivered = 0, read(path, seed=seed)
    if options.cold:  # only cells that were not read before count
        drop([path])
    else:
        while n < 4 * options.fetch:  # everything is open then, and memory is reused
            n += next(delivered)
    start, used, n = time.perf_counter(), time.process_time(), 0
    while n < 4 * options.fetch or time.perf_counter() - start < options.seconds:
        n += next(delivered)
    wall, used = time.perf_counter() - start, time.process_time() - used
    delivered.close()
    return {"cells/s": n / wall, "cells per second of processor time": n / used}


def converted(folder):
    """Write an archive of all files of a folder beside it, and print how long that took."""
    out = folder.with_suffix(".csad")
    files, parts, start = sorted(folder.glob("*.h5ad")), [], time.perf_counter()
    for file in files:
        parts.append(out.with_name(f"{out.stem}-{file.stem}.csad"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_cell_archive(file, parts[-1], overwrite=True)
    concat_cell_archives(parts, out, overwrite=True)
    seconds = time.perf_counter() - start
    for part in parts:
        part.unlink()
    before, after = (sum(p.stat().st_size for p in paths) for paths in (files, [out]))
    say(f"converted in {seconds:.1f} s: {before / 1e6:.0f} MB, then {after / 1e6:.0f}")
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="an archive, or a folder of .h5ad")
    parser.add_argument("stores", type=Path, nargs="*", help="read in place of the archive")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 1024], help="cells at a time")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--fetch", type=int, default=4096, help="cells that cellfeed fetches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    path = converted(options.path) if options.path.is_dir() else options.path
    for size, threads in itertools.product(options.sizes, options.threads):
        common = {"size": size, "threads": threads}
        turns = {
            name: partial(rates_of, partial(gather, is_sorted=is_sorted, **common), path, options)
            for name, is_sorted in (("gather_rows", False), ("gather_rows, sorted", True))
        }
        gathers = list(turns)
        for store, block in itertools.product(options.stores or [path], options.blocks):
            read = partial(minibatches, block_size=block, fetch=options.fetch, **common)
            turns[f"{store.name}, block {block}"] = partial(rates_of, read, store, options)
        title = f"{size} cells, {threads} threads, "
        in_turns(turns, options.rounds, against=gathers, title=title)


if __name__ == "__main__":
    main()
