"""cellfeed and cellstream's own `gather_rows` on one archive.

``--data`` is an archive, or a folder of .h5ad files, which is converted first and timed. Random
cells come as drawn or sorted by `gather_rows`, and in minibatches of as many by `CellDataset`, from
the archive or from ``--stores`` of the same cells. With a cold cache, only cells that were not read
before count.
"""

import itertools
import time
import warnings
from pathlib import Path

import cellstream as cs
import numpy as np
from bench._harness import Case, after, plates_of, say, way, without_end
from cellstream.cell import concat_cell_archives, write_cell_archive

from cellfeed import BlockShuffling, CellDataset, ReadOptions, open_collection


def gather(seed, path, size, threads, first, *, is_sorted):
    store, random = cs.open(path), np.random.default_rng(seed)

    def sizes():
        while True:
            rows = random.integers(0, store.n_obs, size)
            cells = store.gather_rows(np.sort(rows) if is_sorted else rows, n_threads=threads)
            yield len(cells.indptr) - 1

    return after(first, sizes())


def minibatches(seed, path, size, threads, first, block, fetch):
    dataset = CellDataset(
        open_collection(path), BlockShuffling(block), batch_size=size,
        fetch_factor=max(1, fetch // size), seed=seed,
        read_options=ReadOptions(num_threads=threads),
    )  # fmt: skip
    return after(first, without_end(dataset))


def converted(files, out):
    """Write an archive of all files, and print how long that took."""
    start, parts = time.perf_counter(), [out.with_name(f"{each.stem}.csad") for each in files]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file, part in zip(files, parts, strict=True):
            write_cell_archive(file, part, overwrite=True)
        concat_cell_archives(parts, out, overwrite=True)
    seconds = time.perf_counter() - start
    for part in parts:
        part.unlink()
    before, now = (sum(p.stat().st_size for p in paths) / 1e6 for paths in (files, [out]))
    say(f"converted in {seconds:.1f} s: {before:,.0f} MB, then {now:,.0f}")
    return out


def cases(options):
    path = options.data
    if not path.is_file():
        archive = path / "cells.csad"
        path = archive if archive.exists() else converted(plates_of(options), archive)
    first = 4 * options.fetch if options.cache == ["warm"] else 0  # all is open, memory reused
    for size, threads in itertools.product(options.sizes, options.threads):
        given = {"size": size, "threads": threads, "first": first}
        ways = {
            name: way(gather, path=path, is_sorted=is_sorted, **given)
            for name, is_sorted in (("gather_rows", False), ("gather_rows, sorted", True))
        }
        gathers = list(ways)
        stores = [Path(each).resolve() for each in options.stores.split()] or [path]
        for store, block in itertools.product(stores, options.blocks):
            ways[f"{store.name}, block {block}"] = way(
                minibatches, path=store, block=block, fetch=options.fetch, **given
            )
        yield Case(ways, f"{size} cells, {threads} threads", gathers, files=[path, *stores])


OPTIONS = {
    "cells": 28_000,
    "rounds": 5,
    "seconds": 1.0,
    "cache": ["warm"],
    "stores": "",
    "sizes": [64, 1024],
    "threads": [1, 2],
    "blocks": [1, 16],
    "fetch": 4096,
}
