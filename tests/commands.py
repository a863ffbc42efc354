"""The commands, run in this process: what they print, and their exit status."""

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from click import Command
from click.testing import CliRunner, Result

# Commands are imported when they run, since tests of the loader need no tuner.


def run(command: Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(each) for each in arguments])


def autotune(*arguments: object) -> Result:
    from cellfeed_tuner._commands._autotune_cli import main  # noqa: PLC0415

    return run(main, *arguments)


def cellfeed(*arguments: object) -> Result:
    from cellfeed.commands import main  # noqa: PLC0415

    return run(main, *arguments)


@contextmanager
def limited(which: int, most: int) -> Iterator[None]:
    """Set a limit of this process for a while."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def files_end_after(n_bytes: int) -> AbstractContextManager[None]:
    """As on a full disk; only for a while, since pytest may write its own report to a file."""
    return limited(resource.RLIMIT_FSIZE, n_bytes)
