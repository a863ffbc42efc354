"""Time budgets: of a whole run, and of its search."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

# A run ends within this many seconds after its budget, or within this share of it, whichever is
# more. Chosen: what comes in between is stopped late by less.
LEAST_OVERTIME_SECONDS, OVERTIME_SHARE = 2.0, 0.05
# Most of a budget that the time before the first measurement counts for. Chosen: as much is left
# for measuring, however busy the machine is.
START_SHARE = 0.5
# Seconds from the last measurement to the end, if nothing but the answer is written (measured), or
# this share of the time before the first measurement, since both grow with the load; and the most
# of a short budget that is reserved for it.
ANSWER_SECONDS, ANSWER_SHARE_OF_START, ANSWER_SHARE = 1.0, 0.1, 0.1
# A replicate is stopped after this share of the budget, but not before this many seconds.
LIMIT_SHARE, LEAST_REPLICATE_LIMIT_SECONDS = 0.25, 5.0


@dataclass(slots=True)
class TimeBudget:
    """Seconds to spend.

    What comes before the first measurement (imports, entropies, compiling) counts, but for no more
    than half of the budget: see `end_start`.

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
    clock: Callable[[], float] = time.monotonic
    started: float | None = None
    writing_seconds: float = 0.0
    _uncounted: float = field(default=0.0, init=False)
    _answer_seconds: float = field(default=ANSWER_SECONDS, init=False)

    def __post_init__(self) -> None:
        if self.started is None:
            self.started = self.clock()

    @property
    def duration(self) -> float:
        """Seconds since the start, with those that do not count."""
        return self.clock() - (self.started or 0.0)

    @property
    def spent(self) -> float:
        """Seconds spent, possibly more than the budget."""
        return self.duration - self._uncounted

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
        return self.left - min(self._answer_seconds, ANSWER_SHARE * self.seconds)

    @property
    def affords_writing(self) -> bool:
        """Whether there is time to write all of what was found."""
        return self.left + self.overtime / 2 >= self.writing_seconds

    @property
    def limit_seconds(self) -> float:
        """After how many seconds a measurement is stopped."""
        return max(LEAST_REPLICATE_LIMIT_SECONDS, LIMIT_SHARE * self.seconds)

    def end_start(self) -> None:
        """Count no more than half of the budget for the time until now."""
        self._uncounted = max(0.0, self.duration - START_SHARE * self.seconds)
        self._answer_seconds = max(ANSWER_SECONDS, ANSWER_SHARE_OF_START * self.duration)

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
