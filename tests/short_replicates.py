"""Searches that end soon, for tests of what they report rather than of their choice."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 0.1


def shorten(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Measure replicates of a tenth of a second, and end a search after the fewest turns."""
    importlib.import_module("cellfeed_tuner._autotune")
    for name, module in sorted(sys.modules.items()):
        if name.startswith("cellfeed_tuner.") and hasattr(module, "REPLICATE_SECONDS"):
            set_attribute(module, "REPLICATE_SECONDS", SECONDS)
    search = importlib.import_module("cellfeed_tuner._searching._search")

    def has_enough_turns(self: Any, chances: Any) -> bool:
        return bool(self.turns.count(next(iter(chances))) >= search.LEAST_TURNS)

    set_attribute(search.Search, "_is_decided", has_enough_turns)
    durations = importlib.import_module("cellfeed_tuner._searching._durations")

    def has_few(self: Any) -> bool:
        measured, candidates = self._measurements, self._posterior.candidates
        return bool(len(measured) < min(search.FIRST_TRIALS, len({*measured, *candidates})))

    set_attribute(durations.Durations, "is_time_to_propose", property(has_few))
    set_attribute(durations, "LEAST_SUSTAINED_SECONDS", SECONDS)
    set_attribute(durations, "SUSTAINED_SHARE", 0.0)
    prefetch = importlib.import_module("cellfeed_tuner._searching._prefetch")
    set_attribute(prefetch, "MOST_DEPTH_TURNS", prefetch.FEWEST_DEPTH_TURNS)
