"""Compiled functions, if they have been imported already."""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["compiled"]


def compiled(module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a module of `_kernels`; None if the module was not imported.

    Processes that read cells have imported it; for a plan alone, the import would take longer than
    it saves.
    """
    function: Callable[..., Any] | None = getattr(
        sys.modules.get(f"cellfeed.sampling._kernels.{module}"), name, None
    )
    return function
