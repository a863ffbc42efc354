"""Does a run with `adaptive=True` keep up with the best fixed setting, from a good and a bad start?

Reads a matrix in memory whose bytes come late, from the begin or from the middle of the run. Each
turn is a new dataset. Cells per second are those after the first 20 fetches, or after 20 fetches
from where bytes come late; ratios are to the best fixed setting in the same round.
"""

import time
from typing import Any

import numpy as np
import scipy.sparse as sp
from bench._harness import Case, here
from tests.loader.storages.expecting import expecting

from cellfeed import BlockShuffling, CellDataset, ReadOptions

BATCH_SIZE, FETCH_FACTOR = 64, 8
RECOVERY = 20  # fetches
LATENCY, STEP = 0.15, 0.0015  # seconds, of a read and of a training step
ADAPTIVE: dict[str, dict[str, Any]] = {
    "adaptive, good start": {"adaptive": True},
    "adaptive, bad start": {"adaptive": True, "num_threads": 1, "prefetch": 1},
}


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


def turn(seed, collection, late, fetches, *, begins_late, **setting):
    """Return cells per second after the recovery."""
    late(LATENCY if begins_late else 0.0)
    middle = 0 if begins_late else fetches // 2
    dataset = CellDataset(
        collection,
        BlockShuffling(16),
        BATCH_SIZE,
        FETCH_FACTOR,
        seed=seed,
        read_options=ReadOptions(**setting),
    )
    n, ends = 0, []
    while n < fetches * FETCH_FACTOR:
        iterator = iter(dataset)
        for minibatch in iterator:
            del minibatch
            time.sleep(STEP)
            n += 1
            if n % FETCH_FACTOR == 0:
                ends.append(time.perf_counter())
            if n == middle * FETCH_FACTOR:
                late(LATENCY)
            if n == fetches * FETCH_FACTOR:
                break
        iterator.close()
    first = middle + RECOVERY
    cells = (len(ends) - 1 - first) * FETCH_FACTOR * BATCH_SIZE
    return {"cells/s": cells / (ends[-1] - ends[first])}


def cases(options):
    collection, late = late_matrix()
    fixed = {f"prefetch {n}": {"prefetch": n} for n in (1, 4, 8, 16)}
    for title, begins_late in (("late from the begin", True), ("late from the middle on", False)):
        given = {"collection": collection, "late": late, "fetches": options.fetches,
                 "begins_late": begins_late}  # fmt: skip
        ways = {name: here(turn, **given, **each) for name, each in (fixed | ADAPTIVE).items()}
        yield Case(ways, title, list(fixed))


OPTIONS = {"rounds": 7, "fetches": 150}
