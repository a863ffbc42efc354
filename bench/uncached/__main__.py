"""Compare buffered and direct reads of the same files in turns, each epoch from cold.

    python -m bench.uncached FOLDER [--blocks 16 64 512] [--rounds 5] [--batches 1000]

Prints cells/s, processor time per cell, and the share of the files in the page cache afterwards.
"""

import argparse
import time
from functools import partial
from pathlib import Path

from bench._turns import in_turns

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed_tuner._measuring._page_cache import drop_pages, resident_fraction


def epoch(dataset, n_batches, _seed):
    """Read from cold, and return the rates and the share of the files that is cached then."""
    files = dataset.collection.files
    drop_pages(files)
    n_cells, cpu, start = 0, time.process_time(), time.perf_counter()
    iterator = iter(dataset)
    for k, minibatch in enumerate(iterator):
        n_cells += len(minibatch.rows)
        if k + 1 == n_batches:
            break
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    iterator.close()
    return {
        "cells/s": n_cells / seconds,
        "cells per second of processor time": n_cells / cpu,
        "of the files in the page cache": resident_fraction(files),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=1000)
    given = parser.parse_args()
    for block_size in given.blocks:
        turns = {}
        for name, direct in (("buffered", False), ("direct", True)):
            collection = open_collection(given.folder, uncached=direct)
            dataset = CellDataset(
                collection, BlockShuffling(block_size), batch_size=64, fetch_factor=64, seed=0
            )
            turns[name] = partial(epoch, dataset, given.batches)
            turns[name](0)  # which reads the tables
        in_turns(turns, given.rounds, against=["buffered"], title=f"block {block_size}, ")


if __name__ == "__main__":
    main()
