"""Replay searches on recorded grids: ``python -m bench.backtest COMMAND``, from the repository."""

import click
from bench.backtest.grids import grids_command
from bench.backtest.machines import machines_command
from bench.backtest.record import record_command
from bench.backtest.tables import replay_command, table_command, times_command


@click.group()
def main() -> None:
    """Record whole grids, and replay the search of autotune on them."""


for each in (
    *(record_command, replay_command, grids_command),
    *(table_command, times_command, machines_command),
):
    main.add_command(each)

if __name__ == "__main__":
    main(prog_name="python -m bench.backtest")
