"""How does a search end soon, where it does not matter how surely it chooses?"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 0.1


def shorten(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Look at configurations for a tenth of a second, in place of half or a whole one.

    A search ends once the likeliest best was measured in enough turns, though others may be as
    fast.
    """
    importlib.import_module("cellfeed_tuner._autotune")
    for name, module in sorted(sys.modules.items()):
        for constant in ("SLICE_SECONDS", "TURN_SECONDS"):
            if name.startswith("cellfeed_tuner.") and hasattr(module, constant):
                set_attribute(module, constant, SECONDS)
    search = importlib.import_module("cellfeed_tuner._searching._search")

    def has_enough_turns(self: Any, chances: Any) -> bool:
        return bool(self.turns.count(next(iter(chances))) >= search.LEAST_TURNS)

    set_attribute(search.Search, "_is_decided", has_enough_turns)
