"""How fast all usable cores write or copy dense minibatches, with no other work."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from protocol import Job, read_job, report, versions
from storage import open_plates

MINIBATCHES_PER_THREAD = 4  # reused, and together larger than a cache


def work(job: Job, n_columns: int) -> int:
    """Write or copy minibatches until the time is up, and return how many."""
    shape = (job.batch_size, n_columns)
    targets = [torch.ones(shape) for _ in range(MINIBATCHES_PER_THREAD)]
    sources = [torch.ones(shape) for _ in targets] if job.settings["copy"] else []
    n_done = 0
    end = time.perf_counter() + job.seconds
    while time.perf_counter() < end:
        for number, target in enumerate(targets):
            if sources:
                target.copy_(sources[number])
            else:
                target.zero_()
        n_done += len(targets)
    return n_done


if __name__ == "__main__":
    job = read_job()
    torch.set_num_threads(1)  # we use our own threads
    n_columns = open_plates(job.plates[:1])[0].n_columns
    n_threads = len(os.sched_getaffinity(0))
    start = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as pool:
        n_minibatches = sum(pool.map(lambda _: work(job, n_columns), range(n_threads)))
    seconds = time.perf_counter() - start
    report(
        {
            "cells": n_minibatches * job.batch_size,
            "seconds": seconds,
            "bytes": n_minibatches * job.batch_size * n_columns * 4,
            "threads": n_threads,
            "packages": versions(["torch"]),
        }
    )
