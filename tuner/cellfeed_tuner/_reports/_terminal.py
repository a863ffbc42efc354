"""What ``autotune`` prints: the recommendation, why, what was not measured, and code to paste."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from rich.syntax import Syntax

from cellfeed_tuner._reports._code import code_to_paste
from cellfeed_tuner._reports._console import report_console, say
from cellfeed_tuner._reports._words import in_words
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
    console, chosen = report_console(to_stderr=to_stderr, width=100), result.recommended
    console.print()
    if result.loader_fault is not None:
        say(console, in_words("no_choice", result), "bold red reverse")
        say(console, in_words("faults", result), "bold red")
        return
    if chosen is None:
        say(console, in_words("no_choice", result), "bold red")
        say(console, in_words("nothing", result))
    else:
        say(console, [f"Recommended: {chosen.settings}"], "bold green")
        say(console, in_words("why", result))
        if result.bottleneck is not None:
            say(console, [result.bottleneck.sentence])
        say(console, [advice.sentence for advice in result.storage_advice])
    say(console, in_words("warnings", result), "bold yellow")
    say(console, in_words("untimed", result))
    if chosen is not None:
        say(console, ["", "To train with it:"])
        code = code_to_paste(result, saved_as, elements=elements)
        # Not wrapped at the width of the terminal, which would break it.
        console.print(Syntax("", "python").highlight("\n" + indent(code, "    ")), soft_wrap=True)
