"""A result as users see it: printed, as a page, in a notebook, in single sentences."""

import contextlib
import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cellfeed_tuner import AutotuneResult
from cellfeed_tuner._reports._page import html_report
from cellfeed_tuner._reports._progress import LiveDisplay
from cellfeed_tuner._reports._text import code_to_paste, html_summary, in_words, print_report

__all__ = [
    "LiveDisplay",
    "code_to_paste",
    "html_report",
    "html_summary",
    "in_words",
    "page_without_pictures",
    "printed",
    "said_of",
]

SAVED_AS = Path("autotune.json")


def printed(result: AutotuneResult, saved_as: Path = SAVED_AS) -> str:
    """What ``autotune`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_report(result, saved_as)
    return out.getvalue()


def said_of(result: AutotuneResult, saved_as: Path = SAVED_AS) -> str:
    """The same, with lines joined."""
    return " ".join(printed(result, saved_as).split())


def page_without_pictures(result: AutotuneResult, *, code: str) -> str:
    """The page, with an empty picture; drawing it takes nearly all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cellfeed_tuner._reports._page.autotune_figure", lambda _: Figure((1, 1)))
        return html_report(result, code=code)
