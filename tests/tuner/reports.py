"""A result as users see it: printed, as a page, in a notebook, in single sentences."""

import contextlib
import io
from pathlib import Path

from cellfeed_tuner import AutotuneResult
from cellfeed_tuner._reports._page import html_report
from cellfeed_tuner._reports._text import code_to_paste, html_summary, in_words, print_report

__all__ = ["code_to_paste", "html_report", "html_summary", "in_words", "printed", "said_of"]

SAVED_AS = Path("autotune.json")


def printed(result: AutotuneResult, saved_as: Path = SAVED_AS) -> str:
    """What ``autotune`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_report(result, saved_as)
    return out.getvalue()


def said_of(result: AutotuneResult, saved_as: Path = SAVED_AS) -> str:
    """The same, with lines joined."""
    return " ".join(printed(result, saved_as).split())
