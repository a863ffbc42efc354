"""The advice of `autotune`, and the result of following it.

Tunes two collections of the same cells: in gzip as anndata writes it, and in lzf with large chunks.
Follows the advice: writes the shuffled copy, and measures it with the settings of the advice.
Compares the reported time for decompression with uncompressed files, from the page cache. Each
title says what is promised. Copies are beside ``--data``.
"""

from dataclasses import replace

import h5py
from bench._harness import Case, here, plates_of, say

from cellfeed import open_collection, preshuffle
from cellfeed_tuner import autotune, measure

LARGE_CHUNK = 1 << 16  # elements
# Few and small, so that the stages can be timed even on a slow machine.
GRID = {"label": "plate", "block_sizes": [16], "fetch_factors": [64], "workers": [0]}


def rewrite(source, to, *, compression=None, chunk=24_000):
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


def rate(seed, collection, configuration, cache, seconds):
    found = measure(collection, configuration, cache=cache, seconds=seconds, seed=seed)
    return {"cells/s": found.rough_cells_per_second}


def cases(options):
    plates_of(options)
    gzip, lzf, plain = (options.data.with_name(f"{options.data.name}{each}")
                        for each in ("", "-lzf", "-plain"))  # fmt: skip
    rewrite(gzip, lzf, compression="lzf", chunk=LARGE_CHUNK)
    rewrite(gzip, plain)

    def case(title, cache, before, after):
        return Case({
            name: here(rate, collection=collection, configuration=configuration, cache=cache,
                       seconds=options.seconds)
            for name, (collection, configuration) in (("now", before), ("then", after))
        }, title)  # fmt: skip

    for files in (gzip, lzf):
        collection = open_collection(files, obs=["plate"])
        for cache in ("cold", "warm"):
            result = autotune(collection, budget=options.budget, cache=cache, **GRID)
            now, bottleneck = result.recommended.configuration, result.bottleneck
            if bottleneck is not None:
                say(f"{files.name}, {cache}: {bottleneck.sentence}")
            for advice in result.storage_advice if cache == "cold" else ():
                shuffled = files.with_suffix(".zarr")
                if not shuffled.exists():
                    preshuffle(files, shuffled)
                copy = open_collection(shuffled, obs=["plate"])
                then = replace(now, block_size=advice.block_size)
                title = f"{files.name}, shuffled: at least {advice.least_speedup:.2f} times"
                yield case(title, cache, (collection, now), (copy, then))
            if cache == "warm" and bottleneck is not None:
                stages = {each.name: each.saving for each in bottleneck.stages}
                promised = 1 / (1 - stages["decompressing"])
                title = f"{files.name}, without decompression: about {promised:.2f} times"
                none = open_collection(plain, obs=["plate"])
                yield case(title, cache, (collection, now), (none, now))


OPTIONS = {"cells": 28_000, "budget": 40.0, "rounds": 6, "seconds": 3.0}
