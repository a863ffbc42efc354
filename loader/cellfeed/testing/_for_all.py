"""Checks that a suite runs over what hypothesis draws."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

__all__ = ["for_all"]


def for_all(
    check: Callable[..., None], *, max_examples: int, **drawn: st.SearchStrategy[Any]
) -> None:
    """Call ``check`` with what is drawn, the same each time.

    Not a decorator of the tests, which do not know the subclass and what it draws from.

    Parameters
    ----------
    check
        Asserts what is to hold.
    max_examples
        How often it is called at most; a profile of hypothesis may say less.
    **drawn
        Strategies of its arguments.
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
