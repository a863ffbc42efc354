"""How does a server run in a process of its own, which ends with the tests however they end?

The process ends when its input does: at `close`, and where the tests are killed.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["ModuleProcess", "input_ended", "listening"]

_ROOT = Path(__file__).parents[2]


class ModuleProcess:
    """A module of the tests that writes a line and runs until its input ends.

    Parameters
    ----------
    module, arguments
        What ``python -m`` is called with.
    log
        File that takes what the process writes; None leaves it to `line`.
    """

    def __init__(self, module: str, *arguments: str, log: Path | None = None) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        with contextlib.ExitStack() as opened:
            output = None if log is None else opened.enter_context(log.open("wb"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=_ROOT,
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if output is None else output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the tests, which then close this
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def line(self) -> str:
        """Return the next line that the process writes; empty where it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def close(self) -> None:
        """End the process, and wait until it has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def listening() -> tuple[socket.socket, int]:
    """Return a listening socket on loopback that does not block, and its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setblocking(False)
    return listener, listener.getsockname()[1]


async def input_ended() -> None:
    """Return when this process's input has ended."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 1 << 10):
            loop.remove_reader(0)
            ended.set()

    loop.add_reader(0, read)
    await ended.wait()
