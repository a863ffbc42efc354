"""How are scripts run in processes of their own that have imported cellfeed and torch before?

`Popen` and `run` are those of `subprocess`, for commands that begin with `sys.executable`. Each
process is forked from one that waits with the imports done, else it is as any: its own number,
streams, signals and end. What is said of imports, or of Python's options, needs Python itself;
what is said of how processes end, the interpreter's finalization.
"""

import atexit
import functools
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.warm.server import ADDRESS, NUMBER, SHORT_REPLICATES

__all__ = [
    "ADDRESS",
    "OF_SESSION",
    "SHORT_REPLICATES",
    "FinalizedPopen",
    "Popen",
    "address",
    "output_of",
    "run",
    "torchrun",
]

OF_SESSION = "CELLFEED_TESTS_WARM_PYTHON_OF_SESSION"
_SERVER = Path(__file__).with_name("server.py")
_TORCHRUN = """
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from tests.warm.python import Popen

subprocess_handler.Popen = Popen
run.main()
"""
_PIPES = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"


@functools.cache
def address() -> str:
    """Return where the process that forks can be asked; it ends with this one.

    A process that finds it in its environment as `ADDRESS` asks there too, also for what autotune
    measures in; one that finds it as `OF_SESSION`, for what it starts itself.
    """
    for name in (ADDRESS, OF_SESSION):
        if name in os.environ:  # that of the process which started this one
            return os.environ[name]
    folder = tempfile.TemporaryDirectory(prefix="warm")
    path = f"{folder.name}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    server = subprocess.Popen(
        [sys.executable, _SERVER, str(listener.fileno())],
        pass_fds=[listener.fileno()],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    listener.close()

    def end() -> None:
        server.communicate()  # which ends its input
        folder.cleanup()

    atexit.register(end)
    return path


def torchrun(n: int, *command: object) -> str:
    """Run a script as ``torchrun`` does, whose ranks are processes as of `Popen`."""
    return output_of(
        *("-c", _TORCHRUN, "--standalone", "--nproc-per-node", n, *command),
        env=os.environ | {ADDRESS: address(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


class Popen(subprocess.Popen[Any]):
    """A process as of `subprocess.Popen`, forked where the imports are done."""

    _is_finalized = False
    _connection: socket.socket

    def _execute_child(self, *arguments: Any) -> None:
        of_python = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        given = inspect.signature(of_python).bind(self, *arguments).arguments
        python, *command = (os.fspath(each) for each in given["args"])
        assert python == sys.executable
        sys.audit("subprocess.Popen", python, given["args"], given["cwd"], given["env"])
        numbers = [0, 1, 2, *given["pass_fds"]]
        ends = given["p2cread"], given["c2pwrite"], given["errwrite"]
        files = [k if end == -1 else end for k, end in enumerate(ends)] + numbers[3:]
        request = {
            "arguments": command,
            "cwd": os.fspath(given["cwd"] or Path.cwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "is_finalized": self._is_finalized,
            "new_session": bool(given["start_new_session"]),
            "numbers": numbers,
        }
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address())
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        self.pid = self._number()
        self._child_created = True
        pipes = [given[name] for name in _PIPES]
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _number(self) -> int:
        received = self._connection.recv(NUMBER.size, socket.MSG_WAITALL)
        assert received, "the process that forks has ended"
        number: int = NUMBER.unpack(received)[0]
        return number

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        poll = select.poll()  # unlike `select.select`, for any number of open files
        poll.register(self._connection, select.POLLIN)
        if wait_flags and not poll.poll(0):
            return 0, 0
        status = self._number()
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


class FinalizedPopen(Popen):
    """One whose interpreter is finalized at its end, which takes twenty times what a fork does."""

    _is_finalized = True


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 600,
    is_finalized: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does, and take what it writes as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (FinalizedPopen if is_finalized else Popen)(command, **pipes | options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def output_of(*arguments: object, **options: Any) -> str:
    """Run Python to its end, which must be a good one, and return what it prints.

    A crash is told with the last line that was printed before.
    """
    ended = run([sys.executable, *map(str, arguments)], **options)
    last = ended.stdout.splitlines()[-1:]
    assert ended.returncode == 0, f"exit {ended.returncode} after {last}: {ended.stderr[-5000:]}"
    return ended.stdout
