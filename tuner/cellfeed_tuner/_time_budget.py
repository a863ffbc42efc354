"""Time budgets: of a whole run, and of its search."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

# A run ends within this many seconds after its budget, or within this share of it, whichever is
# more. Chosen: what comes in between is stopped late by less.
LEAST_OVERTIME_SECONDS, OVERTIME_SHARE = 2.0, 0.05
# Seconds from the last measurement to the end, if nothing but the answer is written (measured), and
# the most of a short budget that is kept for it (chosen).
ANSWER_SECONDS, ANSWER_SHARE = 1.0, 0.1
# A replicate is stopped after this share of the budget, but not before this many seconds. Chosen.
LIMIT_SHARE, LEAST_REPLICATE_LIMIT_SECONDS = 0.25, 5.0


def time_without_compiling() -> float:
    """Return the time by a clock that stands still while this process compiles, in seconds."""
    from cellfeed.stages import compiling_seconds  # noqa: PLC0415 - help needs no numba

    return time.monotonic() - compiling_seconds()


@dataclass(slots=True)
class TimeBudget:
    """Seconds to spend.

    Parameters
    ----------
    seconds
        How many.
    clock
        Returns the time in seconds.
    started
        Since when they are spent, by the clock; from now on if None.
    writing_seconds
        Seconds that are needed after the end, to write all of what was found.
    """

    seconds: float
    clock: Callable[[], float] = time_without_compiling
    started: float | None = None
    writing_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.started is None:
            self.started = self.clock()

    @property
    def spent(self) -> float:
        """Seconds spent, possibly more than the budget."""
        return self.clock() - (self.started or 0.0)

    @property
    def left(self) -> float:
        """Seconds left; negative if the budget is overspent."""
        return self.seconds - self.spent

    @property
    def overtime(self) -> float:
        """How much longer than its budget a run may take."""
        return max(LEAST_OVERTIME_SECONDS, OVERTIME_SHARE * self.seconds)

    @property
    def left_to_measure(self) -> float:
        """Seconds left for measuring, if nothing but the answer is written afterwards."""
        return self.left - min(ANSWER_SECONDS, ANSWER_SHARE * self.seconds)

    @property
    def affords_writing(self) -> bool:
        """Whether there is time to write all of what was found."""
        return self.left + self.overtime / 2 >= self.writing_seconds

    @property
    def limit_seconds(self) -> float:
        """After how many seconds a measurement is stopped."""
        return max(LEAST_REPLICATE_LIMIT_SECONDS, LIMIT_SHARE * self.seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Spend nothing on what a block does."""
        began = self.clock()
        try:
            yield
        finally:
            self.started = (self.started or 0.0) + self.clock() - began

    def left_until(self, share: float) -> float:
        """Return the seconds left until a share of the budget is spent."""
        return share * self.seconds - self.spent


class Progress(Protocol):
    """Called with the progress of a stage."""

    def __call__(self, stage: str, done: float, total: float, doing: str = "") -> object:
        """Report that ``done`` of ``total`` of a stage is done, and what is being done."""


def silent(stage: str, done: float, total: float, doing: str = "") -> None:
    """Report nothing."""
    del stage, done, total, doing
