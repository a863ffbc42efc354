"""Which epoch an iteration is, agreed on by all worker processes of a DataLoader.

A DataLoader copies the data set into its workers, so a counter inside the data set starts anew
in each of them, and every epoch comes in the same order. The counter is therefore kept in
memory that the processes share. The workers of one iteration know each other by the base seed
that the DataLoader draws for it; the first to arrive claims the next epoch for all. The same
base seed comes again where a user seeds torch anew before each epoch, so a claim ends when all
workers have arrived.
"""

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from cellfeed._descriptors import closed_with

__all__ = ["EpochCounter"]

_NEXT, _N_CLAIMS, _FIRST_CLAIM = 0, 1, 2
# A claim: base seed, 1 + iteration of that worker, epoch, workers that have not arrived.
_SEED, _ITERATION, _EPOCH, _EXPECTED, _CLAIM_SIZE = range(5)
_N_REMEMBERED = 64
_SIZE = _FIRST_CLAIM + _CLAIM_SIZE * _N_REMEMBERED


class EpochCounter:
    """Hands out epoch numbers 0, 1, 2, ..., one per iteration.

    Survives fork and spawn, keeps counting with persistent workers, and can be pickled (a
    pickled copy starts a count of its own at the next epoch). The memory is that of a file
    without a name, which goes with the last process however that one ends.
    """

    def __init__(self, next_epoch: int = 0) -> None:
        fd = _file_without_name()
        os.ftruncate(fd, _SIZE * np.dtype(np.int64).itemsize)
        self._open(fd)
        self._shared[_NEXT] = next_epoch

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration will be; may be set."""
        return int(self._shared[_NEXT])

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._shared[_NEXT] = epoch

    def claim(self) -> int:
        """Return the epoch of an iteration that starts now in this process."""
        worker = get_worker_info()
        with self._locked():
            if worker is None:
                return self._advance()
            return self._claim_together(worker.seed - worker.id, worker.num_workers)

    def _open(self, fd: int) -> None:
        self._fd = fd
        self._closing = closed_with(fd)
        memory = mmap.mmap(fd, _SIZE * np.dtype(np.int64).itemsize)
        self._shared = np.frombuffer(memory, dtype=np.int64)
        self._seed: int | None = None
        self._iteration = 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)  # between processes; released if one dies
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _claim_together(self, base_seed: int, n_workers: int) -> int:
        # A persistent worker keeps its base seed, so its iterations are counted too.
        self._iteration = self._iteration + 1 if self._seed == base_seed else 0
        self._seed = base_seed
        claims = self._shared[_FIRST_CLAIM:].reshape(_N_REMEMBERED, _CLAIM_SIZE)
        for claim in claims:
            same = claim[_SEED] == base_seed and claim[_ITERATION] == self._iteration + 1
            if same and claim[_EXPECTED]:
                claim[_EXPECTED] -= 1
                return int(claim[_EPOCH])
        epoch = self._advance()
        place = int(self._shared[_N_CLAIMS]) % _N_REMEMBERED
        claims[place] = [base_seed, self._iteration + 1, epoch, n_workers - 1]
        self._shared[_N_CLAIMS] += 1
        return epoch

    def _advance(self) -> int:
        epoch = self.next_epoch
        self.next_epoch = epoch + 1
        return epoch

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # a worker is being started: share the memory
            return {"fd": DupFd(self._fd)}
        return {"next_epoch": self.next_epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "fd" in state:
            self._open(state["fd"].detach())
        else:
            self.__init__(state["next_epoch"])  # type: ignore[misc]


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):  # on Linux, it needs no folder that can be written
        return os.memfd_create("cellfeed-epochs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
