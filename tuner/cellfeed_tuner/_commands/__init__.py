"""The command line: ``autotune`` and its subcommands."""

from cellfeed.interrupts import run_command

# Entry point of the ``autotune`` command.

OF_THIS_PROCESS = "began with this process"
"""The object of a click context whose command is all that the process does."""


def main() -> None:
    """Run the command, whose time budget began with this process."""
    run_command("cellfeed_tuner._commands._autotune_cli", obj=OF_THIS_PROCESS)
