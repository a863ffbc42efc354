"""Entry point of the ``cellfeed`` command."""

from cellfeed.interrupts import run_command

__all__ = ["main"]


def main() -> None:
    """Run the command."""
    run_command("cellfeed._cli")
