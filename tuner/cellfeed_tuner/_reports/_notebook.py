"""A result in a few lines, as a notebook shows it."""

from cellfeed_tuner._reports._template import rendered
from cellfeed_tuner._result import AutotuneResult

__all__ = ["html_summary"]


def html_summary(result: AutotuneResult) -> str:
    """Return the recommendation as an element that needs no style: figures, reason and code."""
    return rendered("notebook.html.jinja", result)
