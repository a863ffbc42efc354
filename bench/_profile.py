"""How much is measured: ``CELLFEED_BENCH_PROFILE`` is quick (minutes) or full.

Both measure the same work on the same data; the full profile does so for more parameters, so
that figures of the two can be compared where they have a parameter in common.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

Parameter = TypeVar("Parameter")

PROFILES = ("quick", "full")


def parameters(*, quick: Sequence[Parameter], full: Sequence[Parameter] = ()) -> list[Parameter]:
    """Return values of a parameter: those of the quick profile, and in the full one some more."""
    profile = os.environ.get("CELLFEED_BENCH_PROFILE", "quick")
    if profile not in PROFILES:
        msg = f"`CELLFEED_BENCH_PROFILE` must be one of {', '.join(PROFILES)}, but got {profile!r}"
        raise ValueError(msg)
    return [*quick, *(full if profile == "full" else ())]


class Sampled:
    """How often a time is taken: asv's rank test needs 7 samples of each of two commits."""

    rounds, repeat, warmup_time = 2, 5, 0.01
