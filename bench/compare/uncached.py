"""Buffered and direct reads of the same files, each epoch from a cold page cache."""

from bench._harness import Case, drop, figures_of, plates_of, way

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed_tuner._measuring._page_cache import resident_fraction


def read(seed, paths, block, seconds, *, uncached):
    """Return the rates, and the share of the files that is cached then."""
    collection = open_collection(paths, uncached=uncached)
    collection.load_tables()
    dataset = CellDataset(collection, BlockShuffling(block), 64, fetch_factor=64, seed=seed)
    drop(collection.files)
    rates = figures_of(map(len, dataset), seconds)
    return rates | {"share of the files in the page cache": resident_fraction(collection.files)}


def cases(options):
    for block in options.blocks:
        given = {"paths": plates_of(options), "block": block, "seconds": options.seconds}
        ways = {
            name: way(read, uncached=uncached, **given)
            for name, uncached in (("buffered", False), ("uncached", True))
        }
        yield Case(ways, f"block {block}")


OPTIONS = {"cells": 28_000, "rounds": 5, "seconds": 10.0, "blocks": [16, 64, 512]}
