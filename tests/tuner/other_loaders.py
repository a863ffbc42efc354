"""Loaders that are none of cellfeed's; a module, so that the measuring process finds them."""

import random
import time
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from cellfeed_tuner import Tunable

N_ROWS, BATCH_SIZE = 4096, 32
PLATES = np.repeat(["p0", "p1", "p2", "p3"], N_ROWS // 4)


class Opened(Tunable):
    """Whatever a function opens."""

    def __init__(self, open_loader, *, files=(), batch_size=1, labels=None):
        self.open_loader, self.files, self.batch_size = open_loader, files, batch_size
        self.labels = labels or {}

    def open(self, configuration):
        return self.open_loader()


def collate_nothing(rows):
    msg = "no collation here"
    raise ValueError(msg)


def slowly(n_minibatches, seconds):
    """A loader that waits before each minibatch."""
    return Slow([seconds] * n_minibatches)


class Slow(list[float]):
    """Waits for as long as it says."""

    def __iter__(self):
        for seconds in super().__iter__():
            time.sleep(seconds)
            yield seconds


class Fails(list[int]):
    """Has an error in place of minibatches."""

    def __iter__(self):
        msg = "no minibatch here"
        raise OSError(msg)


class EndsEarly(list[int]):
    """Has fewer minibatches than it says."""

    def __iter__(self):
        return iter(range(2))


class Plates(Tunable):
    """Row numbers in shuffled blocks, shuffled once more within each fetch; blocks cost time."""

    parameters: Mapping[str, Any] = {"block_size": [1, 8, 256], "fetch_factor": [1, 8]}
    labels: Mapping[str, Any] = {"plate": PLATES, "half": np.arange(N_ROWS) < N_ROWS // 2}
    batch_size = BATCH_SIZE
    seconds_per_block = 0.0002

    def open(self, configuration):
        return Blocks(configuration, self.seconds_per_block, random.randrange(1 << 30))

    def labels_of(self, minibatch):
        return {"plate": PLATES[minibatch], "half": minibatch < N_ROWS // 2}


class Blocks:
    """Minibatches of row numbers."""

    def __init__(self, configuration, seconds_per_block, seed):
        self.settings, self.seconds = configuration, seconds_per_block
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return N_ROWS // BATCH_SIZE

    def __iter__(self):
        size = self.settings.block_size
        blocks = self.rng.permutation(N_ROWS // size)
        rows = (blocks[:, None] * size + np.arange(size)).ravel()
        fetch_size = BATCH_SIZE * self.settings.fetch_factor
        for fetch in rows.reshape(-1, fetch_size):
            time.sleep(self.seconds * max(1, fetch_size // size))
            yield from self.rng.permutation(fetch).reshape(-1, BATCH_SIZE)


class PlannedPlates(Plates):
    """The same, with its plan."""

    def planned_rows(self, configuration, n_minibatches):
        loader = Blocks(configuration, 0.0, 0)
        return np.stack([rows for rows, _ in zip(loader, range(n_minibatches), strict=False)])


class ShortWithLargeFetches(PlannedPlates):
    """With large fetches, an epoch is shorter than one of them."""

    def open(self, configuration):
        loader = super().open(configuration)
        return list(islice(loader, 4)) if configuration.fetch_factor == 8 else loader


class OfAnotherSize(Plates):
    """Minibatches are half as large as it says."""

    def open(self, configuration):
        return [rows[: BATCH_SIZE // 2] for rows in super().open(configuration)]


class Unlabelled(Plates):
    """Minibatches lack one of the labels."""

    def labels_of(self, minibatch):
        return {"plate": PLATES[minibatch]}


class WithThreads(Plates):
    """A setting of its own: with it, blocks cost half."""

    parameters: Mapping[str, Any] = {
        "block_size": [8], "fetch_factor": [8], "mode": ["slow", "fast"],
    }  # fmt: skip

    def open(self, configuration):
        cost = 0.004 if configuration["mode"] == "slow" else 0.0004
        return Blocks(configuration, cost, random.randrange(1 << 30))


class RowNumbers(Tunable):
    """A `DataLoader` of row numbers, with workers."""

    parameters: Mapping[str, Any] = {"num_workers": [0, 1]}
    labels: Mapping[str, Any] = {"plate": PLATES}
    batch_size = BATCH_SIZE

    def open(self, configuration):
        return DataLoader(
            TensorDataset(torch.arange(N_ROWS)), self.batch_size, shuffle=True, drop_last=True,
            num_workers=configuration.num_workers,
        )  # fmt: skip

    def labels_of(self, minibatch):
        return {"plate": PLATES[minibatch[0].numpy()]}


def step(minibatch, seconds):
    """A training step that takes some time."""
    assert len(minibatch)
    time.sleep(seconds)


def failing_step(minibatch):
    """A training step that fails."""
    msg = "no such layer"
    raise RuntimeError(msg)


slow_step = partial(step, seconds=0.02)


class Unmixed(PlannedPlates):
    """Delivers rows in the order of storage, whatever it plans."""

    def open(self, configuration):
        return list(np.arange(N_ROWS).reshape(-1, BATCH_SIZE))


class MixedTooWell(Plates):
    """Gives a label of its own to each row."""

    def labels_of(self, minibatch):
        return {"plate": minibatch, "half": minibatch}


class PlansBeyond(PlannedPlates):
    """Plans rows that have no label."""

    def planned_rows(self, configuration, n_minibatches):
        return super().planned_rows(configuration, n_minibatches) + N_ROWS


class FailsToPlan(PlannedPlates):
    """Has a mistake in its plan."""

    def planned_rows(self, configuration, n_minibatches):
        return np.arange(10)[[n_minibatches + 10]]


class Unpicklable(PlannedPlates):
    """Holds what cannot be sent to another process."""

    def __init__(self):
        self.key = lambda row: row
