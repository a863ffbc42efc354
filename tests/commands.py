"""The commands, run in this process: what they print, and their exit status."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from click import Command
from click.testing import CliRunner, Result

# Commands are imported when they run, since tests of the loader need no tuner.


def run(command: Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(each) for each in arguments])


def autotune(*arguments: object) -> Result:
    from cellfeed_tuner._commands._autotune_cli import main  # noqa: PLC0415

    return run(main, *arguments)


def cellfeed(*arguments: object) -> Result:
    from cellfeed._cli import main  # noqa: PLC0415

    return run(main, *arguments)


@contextmanager
def files_end_after(n_bytes: int) -> Iterator[None]:
    """As on a full disk; only for a while, since pytest may write its own report to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
