"""What part of a fetch runs in one thread, and how many cores that part would keep busy.

On Linux. Epochs with different numbers of threads take turns, from a warm page cache; the system
reports how long each thread ran. Planning, dispatching to the decoders, and making minibatches run
in one thread each and share the GIL: their total is the serial part. The ideal divides everything
else evenly among as many cores as threads, of which none ever idles; the serial part alone allows
the cells/s "at most".
"""

import threading
import time
from pathlib import Path

import torch
from bench._harness import Case, here, plates_of

from cellfeed import BlockShuffling, CellDataset, ReadOptions, open_collection


def epoch(seed, dataset, num_threads):
    """Return cells per second, and the processor time per cell of each stage."""
    planning = dataset.statistics().planning
    n_cells, before, began = 0, ran(), time.perf_counter()
    for minibatch in dataset:
        n_cells += len(minibatch)
        if n_cells == len(dataset.collection):
            after, took = ran(), time.perf_counter() - began  # the threads end with the epoch
    planning = dataset.statistics().planning - planning
    seconds = {name: after[name] - before.get(name, 0) for name in after}
    own = seconds["MainThread"]
    ahead = sum(taken for name, taken in seconds.items() if name.startswith("cellfeed-prefetch"))
    total = sum(seconds.values())
    # Dispatching is the part of the thread ahead that does not plan.
    serial = own + ahead
    ideal = max(serial, total / num_threads)
    stages = {"planning": planning, "dispatching": ahead - planning, "minibatches": own,
              "decoding": total - serial}  # fmt: skip
    return {
        "cells/s": n_cells / took,
        "measured / ideal": ideal / took,
        "% serial": 100 * serial / total,
        "cells/s at most": n_cells / serial,
        **{f"us of {name}": 1e6 * taken / n_cells for name, taken in stages.items()},
    }


def ran():
    """Return how long threads of each name have run, in seconds."""
    times = {}
    for thread in threading.enumerate():
        try:
            told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
        except FileNotFoundError:  # it has just ended
            continue
        times[thread.name] = times.get(thread.name, 0) + int(told.split()[0]) / 1e9
    return times


def cases(options):
    torch.set_num_threads(1)
    collection, ways = open_collection(plates_of(options)), {}
    for n in options.threads:
        dataset = CellDataset(
            collection, BlockShuffling(options.block), options.batch, options.fetch,
            seed=0, dense=options.dense, read_options=ReadOptions(num_threads=n),
        )  # fmt: skip
        epoch(0, dataset, n)  # every chunk is verified once, and memory is allocated
        ways[f"{n} threads"] = here(epoch, dataset=dataset, num_threads=n)
    yield Case(ways, f"{len(collection):,} cells", files=[options.data])


OPTIONS = {
    "cells": 28_000,
    "rounds": 5,
    "block": 16,
    "batch": 64,
    "fetch": 64,
    "threads": [1, 2, 4, 8],
    "dense": False,
    "cache": ["warm"],
    "n_ratios": 0,
}
