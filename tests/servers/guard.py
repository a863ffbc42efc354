"""Run a command until standard input ends: what does not look at its input ends with the tests too.

``python -m tests.servers.guard COMMAND ARGUMENT...``
"""

import os
import subprocess
import sys
import threading

__all__: list[str] = []


def _guard(command: list[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def watch() -> None:
        sys.stdin.buffer.read()
        process.kill()

    threading.Thread(target=watch, daemon=True).start()
    return process.wait()


if __name__ == "__main__":
    # Python's own end would wait for the lock of the input, which the watching thread holds.
    os._exit(_guard(sys.argv[1:]) & 255)
