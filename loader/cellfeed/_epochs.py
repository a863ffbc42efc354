"""Which epoch an iteration is, agreed on by all worker processes of a DataLoader.

A DataLoader copies the data set into its workers, so a counter inside the data set starts anew
in each of them, and every epoch comes in the same order. The counter is therefore kept in
memory that the processes share. The workers of one iteration know each other by the base seed
that the DataLoader draws for it; the first to arrive claims the next epoch for all. The same
base seed comes again where a user seeds torch anew before each epoch, so a claim ends when all
workers have arrived.
"""

import multiprocessing
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import get_worker_info

__all__ = ["EpochCounter"]

_NEXT, _N_CLAIMS, _FIRST_CLAIM = 0, 1, 2
_CLAIM_SIZE = 4
_N_REMEMBERED = 64


class EpochCounter:
    """Hands out epoch numbers 0, 1, 2, ..., one per iteration.

    Survives fork and spawn, keeps counting with persistent workers, and can be pickled (a
    pickled copy starts a count of its own at the next epoch).
    """

    def __init__(self, next_epoch: int = 0) -> None:
        # next epoch; number of claims; then for each claim
        # (base seed, 1 + iteration of that worker, epoch, workers that have not arrived)
        context = multiprocessing.get_context("spawn")
        self._shared = context.Array("q", _FIRST_CLAIM + _CLAIM_SIZE * _N_REMEMBERED)
        self._shared[_NEXT] = next_epoch
        self._seed: int | None = None
        self._iteration = 0

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
        with self._shared.get_lock():
            if worker is None:
                return self._advance()
            return self._claim_together(worker.seed - worker.id, worker.num_workers)

    def _claim_together(self, base_seed: int, n_workers: int) -> int:
        # A persistent worker keeps its base seed, so its iterations are counted too.
        self._iteration = self._iteration + 1 if self._seed == base_seed else 0
        self._seed = base_seed
        shared = self._shared
        for place in range(_FIRST_CLAIM, len(shared), _CLAIM_SIZE):
            claimed = (shared[place], shared[place + 1])
            if claimed == (base_seed, self._iteration + 1) and shared[place + 3]:
                shared[place + 3] -= 1
                return int(shared[place + 2])
        epoch = self._advance()
        place = _FIRST_CLAIM + _CLAIM_SIZE * (shared[_N_CLAIMS] % _N_REMEMBERED)
        claim = [base_seed, self._iteration + 1, epoch, n_workers - 1]
        shared[place : place + _CLAIM_SIZE] = claim
        shared[_N_CLAIMS] += 1
        return epoch

    def _advance(self) -> int:
        epoch = int(self._shared[_NEXT])
        self._shared[_NEXT] = epoch + 1
        return epoch

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # a worker is being started: share the memory
            return self.__dict__
        return {"next_epoch": self.next_epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "next_epoch" in state:
            self.__init__(state["next_epoch"])  # type: ignore[misc]
        else:
            self.__dict__.update(state)
