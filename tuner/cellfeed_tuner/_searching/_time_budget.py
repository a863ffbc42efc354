"""How much time there is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["TimeBudget"]

# What takes longer than this share of a budget is stopped; and the least that everything may take.
_LIMIT_SHARE, _LEAST_LIMIT_SECONDS = 0.25, 5.0


@dataclass(slots=True)
class TimeBudget:
    """Seconds to spend from now on.

    Parameters
    ----------
    seconds
        How many.
    clock
        A clock, in seconds.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def spent(self) -> float:
        """How much is gone, which may be more than there was."""
        return self.clock() - self._start

    @property
    def left(self) -> float:
        """How much is left; negative if more is gone than there was."""
        return self.seconds - self.spent

    @property
    def limit_seconds(self) -> float:
        """How long one measurement may take before it is stopped."""
        return max(_LEAST_LIMIT_SECONDS, _LIMIT_SHARE * self.seconds)

    def left_until(self, share: float) -> float:
        """Return how much is left until a share of it is gone."""
        return share * self.seconds - self.spent
