"""How many ranks are fed: what `autotune --ranks 1:8` predicts, and what so many ranks then do.

Storage whose bandwidth all ranks share, and storage that answers late. Ranks sleep for as long as a
training step takes. Figures are utilizations: the share of its time that a rank computes.
"""

import fcntl
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
from bench._harness import Case, here

from cellfeed_tuner import Configuration, Ranks, Tunable
from cellfeed_tuner._measuring._measurement import measure_with
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest
from cellfeed_tuner._scaling import ScalingSearch, utilization

BATCH_SIZE, SECONDS, COUNTS = 64, 60.0, range(1, 9)


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

    def __init__(self, cells_per_second, seconds=0.0):
        self.cells_per_second, self.seconds = cells_per_second, seconds
        self.parameters = {"fetch_factor": [4]}
        self.labels = {"half": np.arange(1 << 19) % 2}
        descriptor, self.clock = tempfile.mkstemp()
        os.write(descriptor, b"0")
        os.close(descriptor)

    def open(self, configuration):
        """Return the rank's part."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return Opened(self, configuration.fetch_factor, (1 << 19) // BATCH_SIZE // world_size)

    def labels_of(self, minibatch):
        """Return the labels."""
        return {"half": minibatch}

    def wait(self, n_cells):
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

    def __init__(self, storage, fetch_factor, n):
        self.storage, self.fetch_factor, self.n = storage, fetch_factor, n

    def __len__(self):
        return self.n

    def __iter__(self):
        minibatch, n_cells = np.arange(BATCH_SIZE) % 2, self.fetch_factor * BATCH_SIZE
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self.storage.wait, n_cells)
            for _ in range(self.n // self.fetch_factor):
                coming.result()
                coming = ahead.submit(self.storage.wait, n_cells)
                yield from [minibatch] * self.fetch_factor


def case(process, title, step_seconds, n_checked):
    """Return predictions for all numbers of ranks, and ways to check some of them."""
    configuration = Configuration(block_size=1, fetch_factor=4)
    began, number = time.monotonic(), count()

    def timed(chosen, **given):
        limit = given.pop("limit_seconds")
        request = TimingRequest(
            configuration=chosen, batch_size=BATCH_SIZE, labels=(), cache="warm", seed=0,
            number=next(number), seconds=1.0, **given,
        )  # fmt: skip
        return measure_with(process, request, limit_seconds=limit)

    def check(seed, predicted):
        n, said = predicted.n_ranks, predicted.utilization
        true = timed(configuration, ranks=Ranks(n_local=n, n_total=n), step_seconds=step_seconds,
                     least_rounds=12, limit_seconds=120.0)  # fmt: skip
        assert true.round_seconds, true.failure
        measured = utilization(true, step_seconds).value
        figures = {"predicted": said.value, "low": said.low, "high": said.high,
                   "measured": measured, "too high by": said.value - measured}  # fmt: skip
        return {f"%, {name}": 100 * value for name, value in figures.items()}

    found = ScalingSearch(
        timed=timed, configuration=configuration, counts=COUNTS, step_seconds=step_seconds,
        batch_size=BATCH_SIZE, left=lambda: began + SECONDS - time.monotonic(),
        has_threads=False, cache="cold",
    ).run()  # fmt: skip
    ways = {f"{each.n_ranks} ranks {each.remark}".strip(): here(check, predicted=each)
            for each in found.ranks if each.n_ranks in n_checked}  # fmt: skip
    return Case(ways, f"{title}: {found.sentence}")


def cases(options):
    for name, storage in (
        ("shared bandwidth", Throttled(1_600.0)),
        ("late answers", Throttled(1e9, seconds=0.5)),
    ):
        for step_seconds in (0.1, 0.2):
            with MeasuringProcess(storage) as process:
                process.start()
                title = f"{name}, {1e3 * step_seconds:g} ms"
                yield case(process, title, step_seconds, options.checked)


OPTIONS = {"rounds": 1, "checked": [1, 2, 3, 4, 6, 8], "n_ratios": 0}
