"""What is compiled, if somebody has imported it already."""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["compiled"]


def compiled(module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a module of `_kernels`; None where that was not imported.

    Whoever reads cells has imported it; for a plan alone it would take longer than it saves.
    """
    function: Callable[..., Any] | None = getattr(
        sys.modules.get(f"cellfeed.sampling._kernels.{module}"), name, None
    )
    return function
