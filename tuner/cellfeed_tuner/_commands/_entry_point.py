"""Entry point of the ``autotune`` command."""

from cellfeed.interrupts import run_command

__all__ = ["main"]


def main() -> None:
    """Run the command."""
    run_command("cellfeed_tuner._commands._autotune_cli")
