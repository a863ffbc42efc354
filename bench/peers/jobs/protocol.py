"""What a loader's job does: read the job, take minibatches for a while, print one line of JSON.

Every job is a script that its peer's own interpreter runs, so this module uses nothing but the
standard library, NumPy and PyTorch, which all of these environments have.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Job:
    """What a job is asked to do.

    Attributes
    ----------
    peer
        Whose loader it opens; for limits, "machine".
    plates
        The collection: ``.h5ad`` files.
    store
        The same cells in the form that the loader reads: a folder.
    label
        Column of ``obs`` that comes with every minibatch.
    batch_size
        Cells of a minibatch.
    seconds
        After so long the job stops at the next whole fetch, unless the epoch has ended before.
    seed
        Another one in every round.
    settings
        Block size, fetch factor and so on, by the loader's own names.
    fingerprints
        Where to write what identifies each delivered cell; None in a round that is timed.
    """

    peer: str
    plates: list[str]
    store: str
    label: str
    batch_size: int
    seconds: float
    seed: int
    settings: dict
    fingerprints: str | None

    @property
    def dense(self) -> bool:
        """Whether minibatches are dense tensors rather than CSR ones."""
        return self.settings.get("dense", False)

    @property
    def fetch_rows(self) -> int:
        """Cells that are read and shuffled together."""
        return self.batch_size * self.settings["fetch_factor"]


@dataclass(frozen=True)
class Loader:
    """A loader that is open and ready for an epoch.

    Attributes
    ----------
    minibatches
        Called once with the clock running; gives each minibatch as a tensor.
    fetch_minibatches
        How many minibatches one fetch makes, of all workers together.
    """

    minibatches: Callable[[], Iterable[torch.Tensor]]
    fetch_minibatches: int


def read_job() -> Job:
    """Return the job in the first argument."""
    return Job(**json.loads(sys.argv[1]))


def run_loader(job: Job, open_loader: Callable[[Job], Loader], packages: Sequence[str]) -> None:
    """Open a loader, take its minibatches with the clock running, and report."""
    loader = open_loader(job)
    report(measure(loader, job) | {"packages": versions(packages)})


def report(result: dict) -> None:
    """Print the result and end at once: workers that still read ahead are not waited for."""
    print(json.dumps(result), flush=True)  # noqa: T201 - this is how a job answers
    sys.stderr.flush()
    os._exit(0)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the installed version of each package."""
    return {package: metadata.version(package) for package in packages}


def measure(loader: Loader, job: Job) -> dict:
    """Take minibatches until the epoch ends or the time is up, then to the end of a fetch."""
    witness = Witness() if job.fingerprints else None
    n_cells = n_minibatches = 0
    first_seconds = None
    start = time.perf_counter()
    for minibatch in loader.minibatches():
        n_minibatches += 1
        n_cells += minibatch.shape[0]
        if first_seconds is None:
            first_seconds = time.perf_counter() - start
        if witness is not None:
            witness.see(minibatch)
        ends_fetch = n_minibatches % loader.fetch_minibatches == 0
        if ends_fetch and time.perf_counter() - start >= job.seconds:
            break
    seconds = time.perf_counter() - start
    if witness is not None:
        witness.write(Path(job.fingerprints))
    return {
        "cells": n_cells,
        "seconds": seconds,
        "first_minibatch_seconds": first_seconds,
        "minibatches": n_minibatches,
        "seen": witness.summary() if witness else None,
    }


class Witness:
    """Notes of every minibatch what a check needs, in a round that is not timed."""

    def __init__(self):
        self._shapes, self._kinds, self._cells = [], set(), []

    def see(self, minibatch: torch.Tensor) -> None:
        """Note shape, layout and type, and each cell's number of non-zeros and total count."""
        self._shapes.append(tuple(minibatch.shape))
        self._kinds.add((str(minibatch.layout), str(minibatch.dtype)))
        if minibatch.layout == torch.sparse_csr:
            n_nonzero = np.diff(minibatch.crow_indices().numpy())
            values = np.append(minibatch.values().numpy().astype(np.float64), 0)
            sums = np.concatenate([[0], np.cumsum(values)])
            ends = minibatch.crow_indices().numpy()
            totals = sums[ends[1:]] - sums[ends[:-1]]
        else:
            n_nonzero = torch.count_nonzero(minibatch, dim=1).numpy()
            totals = minibatch.sum(dim=1, dtype=torch.float64).numpy()
        self._cells.append(np.stack([n_nonzero, totals], axis=1).astype(np.float64))

    def write(self, path: Path) -> None:
        """Save non-zeros and total count of each cell, shape (n_cells, 2)."""
        np.save(path, np.concatenate(self._cells) if self._cells else np.empty((0, 2)))

    def summary(self) -> dict:
        """Return the sizes of the minibatches in order of appearance, each once, and their kind."""
        return {
            "rows": [rows for rows, _ in self._shapes],
            "columns": sorted({columns for _, columns in self._shapes}),
            "kinds": sorted(self._kinds),
        }


def csr_tensor(matrix) -> torch.Tensor:
    """Return a SciPy CSR matrix as a tensor that shares its memory."""
    return torch.sparse_csr_tensor(
        torch.from_numpy(matrix.indptr),
        torch.from_numpy(matrix.indices),
        torch.from_numpy(matrix.data),
        size=matrix.shape,
    )
