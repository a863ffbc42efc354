"""What ``autotune`` prints: the recommendation, why, what was not measured, and code to paste."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import indent

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.text import Text

from cellfeed_tuner._interval import interval
from cellfeed_tuner._reports._code import code_to_paste
from cellfeed_tuner._reports._console import report_console
from cellfeed_tuner._reports._wording import (
    how_measured,
    loader_faults,
    prefetch_in_words,
    rivals_in_words,
    untimed_in_words,
    waiting_in_words,
    warnings_in_words,
    why_no_choice,
    why_nothing,
)
from cellfeed_tuner._result import AutotuneResult

__all__ = ["print_report"]


def print_report(
    result: AutotuneResult,
    saved_as: Path,
    *,
    elements: Sequence[str] = ("X",),
    to_stderr: bool = False,
) -> None:
    """Print the recommendation with its reason, what was not measured, and the code to paste."""
    console = report_console(to_stderr=to_stderr, width=100)
    console.print(_answer(result))
    if result.recommended is not None:
        code = code_to_paste(result, saved_as, elements=elements)
        # Not wrapped at the width of the terminal, which would break it.
        console.print(Syntax("", "python").highlight("\n" + indent(code, "    ")), soft_wrap=True)


def _answer(result: AutotuneResult) -> RenderableType:
    chosen = result.recommended
    warnings = _lines(warnings_in_words(result), "bold yellow")
    untimed = _lines(untimed_in_words(result))
    if result.loader_fault is not None:
        headline = Text(f"\n{why_no_choice(result)}", style="bold red reverse")
        return Group(headline, *_lines(loader_faults(result), "bold red"))
    if chosen is None:
        headline = Text(f"\n{why_no_choice(result)}", style="bold red")
        return Group(headline, *_lines([why_nothing(result)]), *warnings, *untimed)
    memory = f"{chosen.peak_memory_bytes / 1e6:,.0f} MB"
    speed = f"{interval(chosen.cells_per_second)} cells/s{result.ranks.together}"
    why = [
        f"{speed}, {how_measured(result)}; {memory}",
        chosen.reason,
        *rivals_in_words(chosen),
        *prefetch_in_words(result),
        *waiting_in_words(result),
        *([result.bottleneck.sentence] if result.bottleneck is not None else []),
        *(advice.sentence for advice in result.storage_advice),
    ]
    return Group(
        Text(f"\nRecommended: {chosen.settings}", style="bold green"),
        *_lines(why),
        *warnings,
        *untimed,
        Text("\nTo train with it:"),
    )


def _lines(said: Iterable[str], style: str = "") -> list[Text]:
    return [Text(each, style=style) for each in said]
