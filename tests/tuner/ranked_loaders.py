"""What ranks do that are measured side by side; a module, so that these processes find it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from cellfeed_tuner import Tunable

N_ROWS, BATCH_SIZE = 640, 8


def rank() -> int:
    """That of this process; the first one without torchrun's variables."""
    return int(os.environ.get("RANK", "0"))


def note_rows(minibatch, folder):
    """A training step that notes rows, and how many minibatches the other rank had by then."""
    counts = [Path(folder, f"{number}.count") for number in range(2)]
    own, other = counts[rank()], counts[1 - rank()]
    n = int(own.read_text() or 0) + 1 if own.exists() else 1
    n_other = int(other.read_text() or n) if other.exists() else 0
    own.write_text(str(n))
    with Path(folder, f"{rank()}.rows").open("a") as file:
        file.write(f"{n} {n_other} {' '.join(map(str, minibatch.rows.tolist()))}\n")


def note_threads(minibatch, folder):
    """A training step that notes with how many threads a rank would read by itself."""
    del minibatch
    from cellfeed.machine import threads_per_process  # noqa: PLC0415 - as in a script

    Path(folder, f"{rank()}.threads").write_text(str(threads_per_process(1)))


def killed_step(minibatch, folder):
    """A training step in which the second rank is killed."""
    del minibatch
    Path(folder, f"{os.getpid()}.pid").touch()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def failing_step(minibatch):
    """A training step that fails on the second rank."""
    del minibatch
    if rank() == 1:
        msg = "no such layer"
        raise RuntimeError(msg)


_held = list[Any]()


def large_step(minibatch, n_bytes):
    """A training step that holds memory of its own, for long enough to be seen."""
    del minibatch
    if not _held:
        _held.append(np.ones(n_bytes, dtype=np.uint8))
    time.sleep(0.02)


class Numbers(Tunable):
    """Row numbers, of which each rank has those of one parity."""

    parameters: dict[str, Any] = {"fetch_factor": [2]}  # noqa: RUF012 - as users write it
    labels: dict[str, Any] = {"half": np.arange(N_ROWS) < N_ROWS // 2}  # noqa: RUF012
    batch_size = BATCH_SIZE

    def open(self, configuration):
        rows = np.arange(rank(), N_ROWS, int(os.environ.get("WORLD_SIZE", "1")))
        return np.random.permutation(rows).reshape(-1, BATCH_SIZE)  # noqa: NPY002

    def labels_of(self, minibatch):
        return {"half": minibatch < N_ROWS // 2}


class Unequal(Numbers):
    """The second rank has more."""

    def open(self, configuration):
        found = super().open(configuration)
        return found if rank() else found[:-4]


class EndsEarly(Numbers):
    """The second rank has less than it says."""

    def open(self, configuration):
        found = super().open(configuration)
        return Short(found) if rank() else found


class Short(list[Any]):
    """Ends after three."""

    def __iter__(self):
        return iter(self[:3])
