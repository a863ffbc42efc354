"""cellfeed: open a collection once, and read an epoch on each request."""

import json
import resource
import sys
import time
from dataclasses import asdict

from cellfeed import BlockShuffling, CellDataset, open_collection


def counted(paths):
    """Return the requests to servers so far; zeros for local files."""
    if not paths[0].startswith(("http", "s3:")):
        return dict.fromkeys(("n_requests", "n_bytes", "n_wanted", "n_repeated"), 0)
    from cellfeed._bytes._remote._scheduler import _schedulers  # noqa: PLC0415 - there is no public way

    (scheduler,) = _schedulers.values()
    return asdict(scheduler.counters)


def main():
    job = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    options = {"storage_options": job["options"]} if job["options"] else {}
    collection = open_collection(job["paths"], obs=["plate"], **options)
    collection.load_tables()
    dataset = CellDataset(
        collection,
        BlockShuffling(block_size=job["block_size"]),
        batch_size=64,
        fetch_factor=64,
        seed=0,
        prefetch=job["prefetch"],
    )
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)  # noqa: T201
    for line in sys.stdin:
        dataset.set_epoch(int(line))
        before, used = counted(job["paths"]), resource.getrusage(resource.RUSAGE_SELF)
        began, n_cells, first = time.perf_counter(), 0, 0.0
        for minibatch in dataset.loader():
            _ = minibatch.obs["plate"]
            n_cells += minibatch.X.shape[0]
            first = first or time.perf_counter() - began
        seconds = time.perf_counter() - began
        after, now_used = counted(job["paths"]), resource.getrusage(resource.RUSAGE_SELF)
        answer = {name: after[name] - before[name] for name in after}
        cpu = now_used.ru_utime + now_used.ru_stime - used.ru_utime - used.ru_stime
        answer |= {"n_cells": n_cells, "seconds": seconds, "first": first, "cpu": cpu}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
