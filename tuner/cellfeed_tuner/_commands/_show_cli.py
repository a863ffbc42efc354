"""The ``autotune show`` command."""

import click

from cellfeed.console import OneLineErrorCommand

__all__ = ["show_command"]


@click.command("show", cls=OneLineErrorCommand)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def show_command(*, as_json: bool) -> None:
    """List what earlier runs found: the last one on each machine and data set."""
    from cellfeed_tuner._commands._show_report import show  # noqa: PLC0415

    show(as_json=as_json)
