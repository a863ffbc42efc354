"""The command line: ``autotune`` and its subcommands."""

import os
import sys
from contextlib import suppress

from cellfeed.interrupts import run_command


def main() -> None:
    """Run the command ``autotune``, and end at once: deleting all modules would take a second."""
    try:
        run_command("cellfeed_tuner._commands._autotune_cli")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        with suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(end.code or 0)
