"""Running the checks of a suite over examples that hypothesis draws."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

__all__ = ["for_all"]


def for_all(
    check: Callable[..., None], *, max_examples: int, **drawn: st.SearchStrategy[Any]
) -> None:
    """Call ``check`` with drawn arguments, the same in each run.

    This is not a decorator of the tests, since they draw from attributes of the subclass.

    Parameters
    ----------
    check
        The function with assertions.
    max_examples
        Maximum number of calls; a hypothesis profile may lower it.
    **drawn
        Strategies of the arguments.
    """
    configured = settings(
        max_examples=min(max_examples, settings().max_examples),
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    configured(given(**drawn)(check))()
