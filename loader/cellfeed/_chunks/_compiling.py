"""Reporting on stderr that functions are being compiled, if that takes noticeable time.

numba caches compiled code on disk, so this happens once after each installation or upgrade, before
the first file is opened.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from numba.core import event

__all__ = ["CompilingNotice"]

_NOTICEABLE_SECONDS = 1.0
_NOTICE = (
    "cellfeed: compiling for this processor, which takes about 10 seconds, once "
    "after each installation or upgrade"
)


class CompilingNotice(event.Listener):  # type: ignore[misc]  # numba has no types
    """Listens to numba's compilations of cellfeed's functions, and reports them once.

    Parameters
    ----------
    say
        Function that prints the message.
    clock
        A clock, in seconds.
    """

    def __init__(
        self, say: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._began = self._spent = 0.0
        self._is_said = False

    def on_start(self, event: Any) -> None:
        """Report if compilation has already taken long."""
        if not _is_ours(event):
            return
        self._began = self._clock()
        if self._spent >= _NOTICEABLE_SECONDS and not self._is_said:
            self._is_said = True
            self._say(_NOTICE)

    def on_end(self, event: Any) -> None:
        """Add the time of a function."""
        if _is_ours(event):
            self._spent += self._clock() - self._began


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith("cellfeed.")


def _say_on_stderr(said: str) -> None:
    if sys.stderr is not None:  # as in a program without a terminal
        sys.stderr.write(f"{said}\n")
        sys.stderr.flush()


event.register("numba:compile", CompilingNotice(_say_on_stderr))
