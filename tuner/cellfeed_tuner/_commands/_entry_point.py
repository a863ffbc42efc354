"""Entry point of the ``autotune`` command."""

from cellfeed.interrupts import run_command

__all__ = ["OF_THIS_PROCESS", "main"]

OF_THIS_PROCESS = "began with this process"
"""The object of a click context whose command is all that the process does."""


def main() -> None:
    """Run the command, whose time budget began with this process."""
    run_command("cellfeed_tuner._commands._autotune_cli", obj=OF_THIS_PROCESS)
