"""How much time there is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cellfeed_tuner._planning._constants import LEAST_REPLICATE_LIMIT_SECONDS, LIMIT_SHARE

__all__ = ["TimeBudget"]


@dataclass(slots=True)
class TimeBudget:
    """Seconds to spend from now on, by a clock."""

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
        return max(LEAST_REPLICATE_LIMIT_SECONDS, LIMIT_SHARE * self.seconds)

    def left_until(self, share: float) -> float:
        """Return how much is left until a share of it is gone."""
        return share * self.seconds - self.spent
