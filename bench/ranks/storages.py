"""Storage that ranks share; a module, so that the measuring process finds it."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cellfeed_tuner import Configuration, Tunable

BATCH_SIZE = 64


class Throttled(Tunable):
    """Row numbers from storage that all ranks share, one fetch ahead of training.

    Parameters
    ----------
    cells_per_second
        What it gives to all of them.
    seconds
        How long a fetch takes besides.
    """

    batch_size = BATCH_SIZE

    def __init__(self, cells_per_second: float, seconds: float = 0.0) -> None:
        self.cells_per_second, self.seconds = cells_per_second, seconds
        self.parameters = {"fetch_factor": [4]}
        self.labels = {"half": np.arange(1 << 19) % 2}
        descriptor, self.clock = tempfile.mkstemp()
        os.write(descriptor, b"0")
        os.close(descriptor)

    def open(self, configuration: Configuration) -> "Opened":
        """Return the rank's part."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return Opened(self, configuration.fetch_factor, (1 << 19) // BATCH_SIZE // world_size)

    def labels_of(self, minibatch: Any) -> dict[str, Any]:
        """Return the labels."""
        return {"half": minibatch}

    def wait(self, n_cells: int) -> None:
        """Wait until storage has given so many cells, after what it gave to others."""
        with Path(self.clock).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            free = max(time.monotonic(), float(file.read() or 0)) + n_cells / self.cells_per_second
            file.seek(0)
            file.write(f"{free:.9f}")
            file.truncate()
        time.sleep(max(0.0, free - time.monotonic()) + self.seconds)


class Opened:
    """One rank's minibatches."""

    def __init__(self, storage: Throttled, fetch_factor: int, n: int) -> None:
        self.storage, self.fetch_factor, self.n = storage, fetch_factor, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        minibatch = np.arange(BATCH_SIZE) % 2
        n_cells = self.fetch_factor * BATCH_SIZE
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self.storage.wait, n_cells)
            for _ in range(self.n // self.fetch_factor):
                coming.result()
                coming = ahead.submit(self.storage.wait, n_cells)
                yield from [minibatch] * self.fetch_factor
