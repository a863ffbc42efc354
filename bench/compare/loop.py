"""What a training loop of many short operations loses while the loader's threads work beside it.

It stands for a loop that launches kernels on a GPU: a step is ``--operations`` operations on a
small tensor, each of which releases the interpreter and takes it again. Minibatches come from
loaded cells, which two cores deliver about as fast as 16 cores those of files. On Linux; all times
are milliseconds per step in the thread of the loop:

- step, next: processor time of a step, and of taking a minibatch.
- interpreter: how long a step neither ran nor waited for a processor: it waited for the GIL. The
  longest of 100 steps is shown, too.
- core: how long a step waited for a processor, which tells how busy the machine is.
"""

import itertools
import os
import sys
import time

import numpy as np
import torch
from bench._harness import Case, plates_of, way

from cellfeed import BlockShuffling, CellDataset, ReadOptions, open_collection

N_KEPT = 8


def figures(seed, path, operations, seconds, *, kept=False, threads=None, workers=0, interval=None):
    torch.set_num_threads(1)
    if interval is not None:
        sys.setswitchinterval(interval)
    dataset = CellDataset(
        open_collection(path, obs=["plate"]).load(), BlockShuffling(16), 256, fetch_factor=16,
        seed=seed, read_options=ReadOptions(num_threads=threads),
    )  # fmt: skip
    loader = dataset.loader(workers, persistent_workers=workers > 0)
    minibatches = itertools.chain.from_iterable(itertools.repeat(loader))
    if kept:
        minibatches = itertools.cycle(list(itertools.islice(minibatches, N_KEPT)))
    small, file = torch.rand(32, 32), os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now():
        """Return the time, processor time, and time spent waiting for a processor, in seconds."""
        ready = int(os.pread(file, 100, 0).split()[1])
        return np.array([time.perf_counter(), time.thread_time(), ready / 1e9])

    def step():
        x = small
        for _ in range(operations):
            x = torch.tanh(x)

    for _ in range(3 * dataset.fetch_factor):
        next(minibatches)
        step()
    taking, steps, before = [], [], now()
    until = before[0] + seconds
    while before[0] < until:
        next(minibatches)
        begun = now()
        step()
        ended = now()
        taking.append(begun - before)
        steps.append(ended - begun)
        before = ended
    wall, used, ready = 1e3 * np.array(steps).T
    return {
        "ms step": used.mean(),
        "ms next": 1e3 * np.mean(taking, axis=0)[1],
        "ms interpreter": (wall - used - ready).mean(),
        "ms interpreter, 1 of 100": np.quantile(wall - used - ready, 0.99),
        "ms core": ready.mean(),
    }


def cases(options):
    plates_of(options)
    given = {"path": str(options.data / "*.h5ad"), "operations": options.operations}
    given["seconds"] = options.seconds
    ways = {
        "ready minibatches": way(figures, **given, kept=True),
        "threads": way(figures, **given),
        "one thread": way(figures, **given, threads=1),
        "threads, a switch interval of 0.5 ms": way(figures, **given, interval=5e-4),
        "one worker process": way(figures, **given, workers=1),
    }
    yield Case(ways, f"{options.operations} operations a step", files=[options.data])


OPTIONS = {
    "cells": 28_000, "seconds": 4.0, "operations": 400, "cache": ["warm"], "n_ratios": 0,
}  # fmt: skip
