"""How processes that are timed side by side keep in step."""

import multiprocessing
import time
from dataclasses import dataclass
from typing import Any

from cellfeed import ParameterError

__all__ = ["InStep", "Pace", "Shared"]


class Pace:
    """That of a process by itself.

    Attributes
    ----------
    is_first, is_alone
        Whether it is the first of those that keep in step, and the only one.
    """

    is_first = is_alone = True

    def require_alike(self, n_rounds: int) -> None:
        """Refuse epochs of different lengths."""

    def meet(self) -> float:
        """Wait until all are here, and return for how many seconds."""
        return 0.0

    def agreed(self, *, ended: bool) -> bool:
        """Return what the first has to say, when all are here."""
        return ended

    def leave(self) -> None:
        """Let nobody wait for this one any more."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the processes share, which are forked after it is made."""

    barrier: Any
    has_ended: Any
    n_rounds: Any

    @classmethod
    def by(cls, n: int) -> "Shared":
        """Return it for so many processes."""
        context = multiprocessing.get_context("fork")
        return cls(context.Barrier(n), context.RawValue("b", 0), context.RawArray("q", n))


class InStep(Pace):
    """That of one of several, which share what they keep in step by.

    Raises
    ------
    threading.BrokenBarrierError
        From all methods that wait: another has left.
    """

    is_alone = False

    def __init__(self, shared: Shared, number: int) -> None:
        self._shared, self._number = shared, number
        self.is_first = number == 0

    def require_alike(self, n_rounds: int) -> None:
        """Refuse epochs of different lengths, in which ranks would wait for each other for ever.

        Raises
        ------
        ParameterError
            Another has more or fewer rounds.
        """
        self._shared.n_rounds[self._number] = n_rounds
        self.meet()
        found = list(self._shared.n_rounds)
        if len(set(found)) > 1:
            msg = (
                f"an epoch has {found} rounds of whole fetches on ranks 0 to {len(found) - 1}, "
                "which would wait for each other for ever; give each rank as many minibatches"
            )
            raise ParameterError(msg)

    def meet(self) -> float:
        """Wait until all are here, and return for how many seconds."""
        began = time.perf_counter()
        self._shared.barrier.wait()
        return time.perf_counter() - began

    def agreed(self, *, ended: bool) -> bool:
        """Return what the first has to say, when all are here."""
        if self.is_first:
            self._shared.has_ended.value = ended
        self.meet()
        return bool(self._shared.has_ended.value)

    def leave(self) -> None:
        """Let nobody wait for this one any more."""
        self._shared.barrier.abort()
