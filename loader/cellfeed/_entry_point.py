"""Entry point of the ``cellfeed`` command."""

from cellfeed.interrupts import run_command


def main() -> None:
    """Run the command."""
    run_command("cellfeed.commands")
