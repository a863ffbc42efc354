"""Three ways to the same cells: files as they are, a shuffled copy, and cells that are loaded.

Each delivers minibatches of 64 cells after one epoch, in which memory becomes its own. The last
table is the time to load, beside an epoch in storage order.
"""

from bench._harness import Case, plates_of, way, without_end

from cellfeed import BlockShuffling, CellDataset, Streaming, open_collection, preshuffle


def shuffled(seed, path, block, *, load=False):
    collection = open_collection(path)
    if load:
        collection = collection.load()
    loader = CellDataset(collection, BlockShuffling(block), 64, fetch_factor=64, seed=seed)
    for _ in loader:
        pass
    return without_end(loader)


def in_storage_order(seed, path):
    return map(len, CellDataset(open_collection(path), Streaming(), 64, fetch_factor=64, seed=seed))


def loaded(seed, path):
    yield len(open_collection(path).load())


def cases(options):
    plates_of(options)
    copy = options.data.with_name(f"{options.data.name}.zarr")
    if not copy.exists():
        preshuffle(options.data, copy, seed=0)
    files = str(options.data / "*.h5ad")
    for block in (16, 1):
        ways = {
            "files, gzip": way(shuffled, path=files, block=block),
            "a copy": way(shuffled, path=copy, block=block),
            "loaded": way(shuffled, path=files, block=block, load=True),
        }
        yield Case(ways, f"blocks of {block}", files=[options.data, copy])
    ways = {"an epoch": way(in_storage_order, path=files), "load": way(loaded, path=files)}
    yield Case(ways, "once, in storage order", files=[options.data])


OPTIONS = {"cells": 28_000, "seconds": 4.0, "cache": ["warm"]}
