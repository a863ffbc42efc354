"""Keeping the processes of several ranks in step, as ranks are in training.

They wait for each other at the end of every round, so that a round takes as long as on the slowest
rank, and delivers the cells of all.
"""

import multiprocessing
import time
from types import TracebackType
from typing import Any

from cellfeed import ParameterError

__all__ = ["Pace"]


class Pace:
    """One rank's place in step with the others; the only rank if there is no ``barrier``.

    A context manager: the others stop waiting if this rank fails. All methods that wait raise
    `threading.BrokenBarrierError` if another rank has failed.

    Parameters
    ----------
    rank
        The local rank.
    barrier, has_ended, n_rounds
        Memory shared with the other ranks, which are forked after it is made.
    """

    def __init__(
        self, rank: int = 0, barrier: Any = None, has_ended: Any = None, n_rounds: Any = None
    ) -> None:
        self._rank, self._barrier = rank, barrier
        self._has_ended, self._n_rounds = has_ended, n_rounds
        self.is_first, self.is_alone = rank == 0, barrier is None

    @classmethod
    def of_ranks(cls, n: int) -> "list[Pace]":
        """Return one for each of ``n`` ranks."""
        context = multiprocessing.get_context("fork")
        shared = context.Barrier(n), context.RawValue("b", 0), context.RawArray("q", n)
        return [cls(rank, *shared) for rank in range(n)]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.leave()

    def require_equal_epochs(self, n_rounds: int) -> None:
        """Refuse epochs of different lengths, in which ranks would wait for each other forever."""
        if self.is_alone:
            return
        self._n_rounds[self._rank] = n_rounds
        self.meet()
        found = list(self._n_rounds)
        if len(set(found)) > 1:
            msg = (
                f"an epoch has {found} rounds of whole fetches on ranks 0 to {len(found) - 1}, "
                "which would wait for each other for ever; give each rank as many minibatches"
            )
            raise ParameterError(msg)

    def meet(self) -> float:
        """Wait for all ranks, and return for how many seconds."""
        if self.is_alone:
            return 0.0
        began = time.perf_counter()
        self._barrier.wait()
        return time.perf_counter() - began

    def agreed(self, *, ended: bool) -> bool:
        """Wait for all ranks, and return what the first one passed."""
        if self.is_alone:
            return ended
        if self.is_first:
            self._has_ended.value = ended
        self.meet()
        return bool(self._has_ended.value)

    def leave(self) -> None:
        """Stop the others from waiting for this rank."""
        if not self.is_alone:
            self._barrier.abort()
