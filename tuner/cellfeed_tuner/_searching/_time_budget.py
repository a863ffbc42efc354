"""The time budget of a search."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cellfeed_tuner._planning._constants import LEAST_REPLICATE_LIMIT_SECONDS, LIMIT_SHARE

__all__ = ["TimeBudget"]


@dataclass(slots=True)
class TimeBudget:
    """Seconds to spend, from now on."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def spent(self) -> float:
        """Seconds spent, possibly more than the budget."""
        return self.clock() - self._start

    @property
    def left(self) -> float:
        """Seconds left; negative if the budget is overspent."""
        return self.seconds - self.spent

    @property
    def limit_seconds(self) -> float:
        """After how many seconds a measurement is stopped."""
        return max(LEAST_REPLICATE_LIMIT_SECONDS, LIMIT_SHARE * self.seconds)

    def left_until(self, share: float) -> float:
        """Return the seconds left until a share of the budget is spent."""
        return share * self.seconds - self.spent
