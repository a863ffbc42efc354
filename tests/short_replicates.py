"""Searches that end soon, for tests of what they report rather than of their choice."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 0.1


def shorten(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Measure replicates of a tenth of a second, few pairs, and the fewest turns."""
    importlib.import_module("cellfeed_tuner._autotune")
    for name, module in sorted(sys.modules.items()):
        for each in ("REPLICATE_SECONDS", "PROFILE_SECONDS"):
            if name.startswith("cellfeed_tuner.") and hasattr(module, each):
                set_attribute(module, each, SECONDS)
    search = importlib.import_module("cellfeed_tuner._searching._search")
    set_attribute(search, "LEAST_TURNS", 1)
    set_attribute(search, "LEAST_CHANCE", 1.0)
    set_attribute(search, "PROFILE_SHARE", 0.0)
    set_attribute(search, "FEWEST_TIMED", 1)
    set_attribute(search, "LEAST_SUSTAINED_SECONDS", SECONDS)
    set_attribute(search, "SUSTAINED_SHARE", 0.0)
