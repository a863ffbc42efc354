"""Whether processes that were forked from this one still exist."""

import contextlib
import os
import select
from typing import ClassVar

__all__ = ["Fork"]


class Fork:
    """The next forked process, and all processes forked from it.

    They inherit one end of a pipe, which the system closes when the last of them exits or executes
    another program. If no pipe can be opened, they are assumed to live for ever.
    """

    _beginning: ClassVar[list[int]] = []  # descriptors that forks keep, and this process closes

    def __init__(self) -> None:
        self._ended: int | None = None

    def begin(self, is_asked: bool) -> None:  # noqa: FBT001 - the only argument
        """Open the pipe, if `has_ended` will be used."""
        if is_asked:
            with contextlib.suppress(OSError):
                self._ended, alive = os.pipe()
                self._beginning.append(alive)

    @classmethod
    def has_begun(cls) -> None:
        """Close the end of the pipe that belongs to the fork."""
        while cls._beginning:
            os.close(cls._beginning.pop())

    @classmethod
    def has_begun_here(cls) -> None:
        """Keep that end: this is the fork."""
        cls._beginning.clear()

    def has_ended(self) -> bool:
        """Whether all of these processes have exited."""
        if self._ended is None:
            return False
        ends = select.poll()
        ends.register(self._ended, 0)  # the closing of the other end is always reported
        return bool(ends.poll(0))

    def __del__(self) -> None:
        if self._ended is not None:
            os.close(self._ended)
