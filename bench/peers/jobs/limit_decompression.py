"""How many cells per second if only decompression took time.

All usable cores decompress chunks that are in memory already. With a block size, these are the
distinct chunks that a fetch of random blocks touches; without one, every chunk once.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from chunks import Chunks, chunks_of_plate, chunks_of_store
from protocol import Job, read_job, report, versions
from storage import Matrix, open_plates, open_store, random_fetches, store_parts

CHUNKS_PER_TASK = 32  # so that handing out work costs nothing measurable
CHUNKS_PER_RUN = 512  # of each array, if every chunk is decompressed once

Work = tuple[float, list[tuple[Chunks, int]]]  # cells, and the chunks that they need


def whole_chunks(
    matrices: list[Matrix], tables: list[list[Chunks]], rng: np.random.Generator
) -> Iterator[Work]:
    """Divide an epoch into runs of neighbouring chunks, in random order."""
    runs = [
        (number, start)
        for number, table in enumerate(tables)
        for start in range(0, len(table[0].places), CHUNKS_PER_RUN)
    ]
    for number, start in (runs[i] for i in rng.permutation(len(runs))):
        matrix, (data, indices) = matrices[number], tables[number]
        if len(data.places) != len(indices.places):
            raise SystemExit("`data` and `indices` must have chunks of the same size")
        chosen = range(start, min(start + CHUNKS_PER_RUN, len(data.places)))
        n_elements = min(chosen.stop * data.n_elements, int(matrix.indptr[-1]))
        n_elements -= start * data.n_elements
        cells = n_elements / matrix.indptr[-1] * matrix.n_rows
        yield cells, [(array, chunk) for array in (data, indices) for chunk in chosen]


def touched_chunks(
    matrices: list[Matrix], tables: list[list[Chunks]], job: Job, rng: np.random.Generator
) -> Iterator[Work]:
    """Divide an epoch into fetches of random blocks, with the chunks that each one touches."""
    for blocks in random_fetches(matrices, job.settings["block_size"], job.fetch_rows, rng):
        touched = set()
        for number, start, stop in blocks:
            first, last = matrices[number].indptr[[start, stop]].tolist()
            for which, array in enumerate(tables[number]):
                touched.update((number, which, chunk) for chunk in array.touched(first, last))
        cells = sum(stop - start for _, start, stop in blocks)
        yield cells, [(tables[number][which], chunk) for number, which, chunk in sorted(touched)]


def measure(works: Iterator[Work], seconds: float) -> dict:
    """Decompress until the epoch ends or the time is up, not counting the time to read."""
    cells = spent = n_bytes = 0.0
    n_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(n_threads) as pool:
        for n_cells, needed in works:
            raws = [(array, array.read(chunk)) for array, chunk in needed]
            tasks = [raws[i : i + CHUNKS_PER_TASK] for i in range(0, len(raws), CHUNKS_PER_TASK)]
            start = time.perf_counter()
            for _ in pool.map(decompress_all, tasks):
                pass
            spent += time.perf_counter() - start
            cells += n_cells
            n_bytes += sum(len(raw) for _, raw in raws)
            if spent >= seconds:
                break
    return {"cells": cells, "seconds": spent, "bytes": n_bytes, "threads": n_threads}


def decompress_all(raws: list[tuple[Chunks, bytes]]) -> None:
    for array, raw in raws:
        if raw:
            array.decompress(raw)


if __name__ == "__main__":
    job = read_job()
    rng = np.random.default_rng(job.seed)
    if job.settings["storage"] == "h5ad":
        matrices = open_plates(job.plates)
        tables = [chunks_of_plate(matrix) for matrix in matrices]
        packages = ["deflate"]
    else:
        matrices = open_store(job.store)
        tables = [chunks_of_store(part) for part in store_parts(job.store)]
        packages = ["numcodecs"]
    if "block_size" in job.settings:
        works = touched_chunks(matrices, tables, job, rng)
    else:
        works = whole_chunks(matrices, tables, rng)
    report(measure(works, job.seconds) | {"packages": versions(packages)})
