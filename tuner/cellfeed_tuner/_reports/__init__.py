"""A result in words: in a terminal, as a page, as code to paste."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text


def report_console(*, to_stderr: bool = False, width: int = 120) -> Console:
    """Return a console as wide as the terminal, or of the given width without one."""
    console = Console(stderr=to_stderr)
    return console if console.is_terminal else Console(stderr=to_stderr, width=width)


def say(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Print lines without markup, in one style."""
    for line in lines:
        console.print(Text(line, style=style))
