"""Where reports are printed."""

from rich.console import Console

__all__ = ["report_console"]


def report_console(*, to_stderr: bool = False, width: int = 120) -> Console:
    """Return a console as wide as the terminal; as wide as given where there is none."""
    console = Console(stderr=to_stderr)
    return console if console.is_terminal else Console(stderr=to_stderr, width=width)
