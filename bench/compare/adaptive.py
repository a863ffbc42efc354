"""Does a run with `adaptive=True` keep up with the best fixed setting, from a good and a bad start?

Reads the .h5ad files of ``--data`` from the page cache, with training steps that sleep and that use
a processor, and a matrix in memory whose bytes come late, from the begin or from the middle of the
run. Each turn is a new dataset. Cells per second are those after the first 20 fetches, or after 20
fetches from where bytes come late; ratios are to the best fixed setting in the same round.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from bench._harness import Case, here, plates_of, say
from tests.loader.storages.expecting import expecting

from cellfeed import BlockShuffling, CellDataset, Collection, open_collection
from cellfeed.machine import usable_cpu_count

BATCH_SIZE, FETCH_FACTOR = 64, 8
RECOVERY = 20  # fetches
ADAPTIVE: dict[str, dict[str, Any]] = {
    "adaptive, good start": {"adaptive": True},
    "adaptive, bad start": {"adaptive": True, "num_threads": 1, "prefetch": 1},
}


def sleeps(seconds):
    return lambda: time.sleep(seconds)


def computes(seconds):
    """Return a step that uses one processor, for so long if it has it to itself."""
    values = torch.rand(256, 256)
    torch.set_num_threads(1)

    def times(n):
        begin = time.thread_time()
        for _ in range(n):
            values @ values
        return time.thread_time() - begin

    times(100)
    n = max(1, round(seconds * 1000 / times(1000)))
    return lambda: times(n)


@dataclass
class Run:
    """What is read, and trained on; `late` is called before each turn, and from its middle on."""

    collection: Collection
    step: Callable[[], object]
    late: Callable[[float], object] = float
    latency: float = 0.0
    begins_late: bool = False

    def turn(self, seed, fetches, **setting):
        """Return cells per second after the recovery."""
        self.late(self.latency if self.begins_late else 0.0)
        middle = fetches // 2 if self.latency and not self.begins_late else 0
        n, ends = 0, []
        dataset = CellDataset(
            self.collection, BlockShuffling(16), BATCH_SIZE, FETCH_FACTOR, seed=seed, **setting
        )
        while n < fetches * FETCH_FACTOR:
            iterator = iter(dataset)
            for minibatch in iterator:
                del minibatch
                self.step()
                n += 1
                if n % FETCH_FACTOR == 0:
                    ends.append(time.perf_counter())
                if n == middle * FETCH_FACTOR:
                    self.late(self.latency)
                if n == fetches * FETCH_FACTOR:
                    break
            iterator.close()
        first = middle + RECOVERY
        cells = (len(ends) - 1 - first) * FETCH_FACTOR * BATCH_SIZE
        return {"cells/s": cells / (ends[-1] - ends[first])}


def late_matrix(n_rows=40_000, n_columns=500):
    """Return a matrix whose bytes come as late as is set after they were requested."""
    matrix = sp.random(n_rows, n_columns, 0.02, "csr", np.float32, random_state=0)
    collection, store = expecting(matrix, chunk_length=1 << 14)
    due, expect, read, latency = dict[int, float](), store.expect, store.read_ranges, [0.0]

    def expected(files, offsets, sizes):
        due[int(offsets[0])] = time.perf_counter() + latency[0]
        return expect(files, offsets, sizes)

    def came(files, offsets, sizes):
        time.sleep(max(0.0, due.pop(int(offsets[0]), 0.0) - time.perf_counter()))
        return read(files, offsets, sizes)

    store.expect, store.read_ranges = expected, came
    return collection, lambda seconds: latency.__setitem__(0, seconds)


def cases(options):
    files = open_collection(plates_of(options))
    threads = {f"{n} threads": {"num_threads": n} for n in {1, usable_cpu_count()}}
    depths = {f"prefetch {n}": {"prefetch": n} for n in (1, 4, 8, 16)}
    late, set_latency = late_matrix()
    # The time of a minibatch if nothing is trained.
    alone = BATCH_SIZE / Run(files, lambda: None).turn(0, 60)["cells/s"]
    say(f"a minibatch of the files takes {1000 * alone:.2f} ms")
    step = sleeps(0.0015)
    for title, run, fixed in (
        ("step sleeps 0.1 of that", Run(files, sleeps(alone / 10)), threads),
        ("step sleeps twice that", Run(files, sleeps(alone * 2)), threads),
        ("step computes half of that", Run(files, computes(alone / 2)), threads),
        ("step computes twice that", Run(files, computes(alone * 2)), threads),
        ("bytes come late", Run(late, step, set_latency, 0.15, begins_late=True), depths),
        ("bytes come late from the middle on", Run(late, step, set_latency, 0.15), depths),
    ):
        if options.only in title:
            ways = {name: here(run.turn, fetches=options.fetches, **setting)
                    for name, setting in (fixed | ADAPTIVE).items()}  # fmt: skip
            yield Case(ways, title, list(fixed))


OPTIONS = {"cells": 28_000, "rounds": 7, "fetches": 150, "only": ""}
