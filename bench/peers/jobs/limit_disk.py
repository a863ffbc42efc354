"""How fast the files can be read from end to end, several at a time, with no other work."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from protocol import read_job, report
from storage import open_plates, open_store

READ_BYTES = 8 << 20


def read(path: Path, end: float) -> int:
    """Read a file to its end or until the time is up, and return the number of bytes."""
    buffer = bytearray(READ_BYTES)
    n_bytes = 0
    with path.open("rb", buffering=0) as file:
        while time.perf_counter() < end and (count := file.readinto(buffer)):
            n_bytes += count
    return n_bytes


if __name__ == "__main__":
    job = read_job()
    of_plates = job.settings["storage"] == "h5ad"
    matrices = open_plates(job.plates) if of_plates else open_store(job.store)
    n_cells = sum(matrix.n_rows for matrix in matrices)
    if of_plates:
        paths = [Path(plate) for plate in job.plates]
    else:
        paths = [path for path in Path(job.store).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in paths)
    order = np.random.default_rng(job.seed).permutation(len(paths))
    start = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        ends = [start + job.seconds] * len(paths)
        n_bytes = sum(pool.map(read, [paths[i] for i in order], ends))
    seconds = time.perf_counter() - start
    report({"cells": n_cells * n_bytes / size, "seconds": seconds, "bytes": n_bytes})
