"""cellstream: every cell of its archive once, at random, by its own `gather_rows`."""

import os
from pathlib import Path

import cellstream
import numpy as np
from protocol import Job, Loader, csr_tensor, run_loader


def open_loader(job: Job) -> Loader:
    store = cellstream.open(Path(job.store) / "cells.csad")
    labels = store.obs[job.label].to_numpy()
    rng = np.random.default_rng(job.seed)
    n_threads = len(os.sched_getaffinity(0))

    def minibatches():
        order = rng.permutation(store.n_obs)
        for start in range(0, store.n_obs, job.fetch_rows):
            # Sorted, which is its fastest; what is fetched at once is shuffled once more.
            rows = np.sort(order[start : start + job.fetch_rows])
            cells = store.gather_rows(rows, n_threads=n_threads)
            if len(rows) <= job.batch_size:
                _ = labels[rows]
                yield csr_tensor(cells)
                continue
            places = rng.permutation(len(rows))
            for first in range(0, len(rows), job.batch_size):
                chosen = places[first : first + job.batch_size]
                _ = labels[rows[chosen]]
                yield csr_tensor(cells[chosen])

    return Loader(minibatches, job.settings["fetch_factor"])


if __name__ == "__main__":
    run_loader(open_loader, ["cellstream", "torch", "numpy"])
