"""Whether processes that were forked from this one are still there."""

import contextlib
import os
import select
from typing import ClassVar

__all__ = ["Fork"]


class Fork:
    """The process that is forked next, and those that are forked from it.

    They inherit one end of a pipe, which the system closes with the last of them, or where one
    becomes another program. Where no pipe can be opened, they are taken to live for ever.
    """

    _beginning: ClassVar[list[int]] = []  # descriptors that forks keep, and this process does not

    def __init__(self) -> None:
        self._ended: int | None = None

    def begin(self, is_asked: bool) -> None:  # noqa: FBT001 - all that there is to say
        """Open the pipe, if anybody will ask."""
        if is_asked:
            with contextlib.suppress(OSError):
                self._ended, alive = os.pipe()
                self._beginning.append(alive)

    @classmethod
    def has_begun(cls) -> None:
        """Close what only the fork is to have."""
        while cls._beginning:
            os.close(cls._beginning.pop())

    @classmethod
    def has_begun_here(cls) -> None:
        """Keep it: this is the fork."""
        cls._beginning.clear()

    def has_ended(self) -> bool:
        """Whether none of the processes is there any more."""
        if self._ended is None:
            return False
        ends = select.poll()
        ends.register(self._ended, 0)  # that the other end is closed is always told
        return bool(ends.poll(0))

    def __del__(self) -> None:
        if self._ended is not None:
            os.close(self._ended)
