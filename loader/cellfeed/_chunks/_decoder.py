"""Who decodes chunks, and how often they are checked."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar, get_args

from cellfeed._buffers import BufferPool
from cellfeed._chunks._counters import Counters
from cellfeed._errors import ParameterError

__all__ = ["Decoder", "Verify", "check_verify"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Verify: TypeAlias = Literal["first", "always", "never"]


@dataclass(frozen=True, slots=True)
class Decoder:
    """Threads that decode chunks, and which chunks they decompress to the end.

    Checksums, and whether a chunk has its size, are known at its end alone.

    Parameters
    ----------
    threads, n_threads
        Who does it, and how many of them; the calling thread if None.
    verify
        "first": each chunk is decompressed whole the first time that this process meets it, or one
        of those that were forked from the process that opened its file, and after that only as far
        as its elements are wanted; "always": whole each time; "never".
    counters
        What adds up bytes, chunks and time.
    pool
        Memory for lists of what is kept of rows. (New memory for each fetch costs more, in page
        faults, than to fill it.)
    """

    threads: Executor | None = None
    n_threads: int = 1
    verify: Verify = "first"
    counters: Counters = field(default_factory=Counters)
    pool: BufferPool = field(default_factory=BufferPool)

    def alone(self) -> "Decoder":
        """Return one that works in the calling thread."""
        return Decoder(verify=self.verify, counters=self.counters)

    def map(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Call a function with each item, side by side."""
        in_turn = map if self.threads is None else self.threads.map
        return list(in_turn(function, items))


def check_verify(verify: Verify) -> Verify:
    """Return how often chunks are checked.

    Raises
    ------
    ParameterError
        It is none of "first", "always" and "never".
    """
    if verify not in get_args(Verify):
        modes = ", ".join(map(repr, get_args(Verify)))
        msg = f"`verify` must be one of {modes}, but got {verify!r}"
        raise ParameterError(msg)
    return verify
