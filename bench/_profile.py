"""How much to measure: ``CELLFEED_BENCH_PROFILE`` is quick (minutes) or full.

Both measure the same work on the same data. The full profile covers more parameters, so figures
of the two can be compared where they share a parameter.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

Parameter = TypeVar("Parameter")

PROFILES = ("quick", "full")


def parameters(*, quick: Sequence[Parameter], full: Sequence[Parameter] = ()) -> list[Parameter]:
    """Return a parameter's values: those of the quick profile, plus others in the full one."""
    profile = os.environ.get("CELLFEED_BENCH_PROFILE", "quick")
    if profile not in PROFILES:
        msg = f"`CELLFEED_BENCH_PROFILE` must be one of {', '.join(PROFILES)}, but got {profile!r}"
        raise ValueError(msg)
    return [*quick, *(full if profile == "full" else ())]


class Sampled:
    """Return how often to take a time: asv's rank test needs 7 samples of each of two commits."""

    rounds, repeat, warmup_time = 2, 5, 0.01


class _Measured(Sampled):
    """Take the time and the peak memory of `run`, which each benchmark defines."""

    def time_run(self, *arguments):
        self.run(*arguments)

    def peakmem_run(self, *arguments):
        self.run(*arguments)
