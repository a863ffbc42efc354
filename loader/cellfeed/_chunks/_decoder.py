"""The threads that decode chunks, and how often chunks are checked."""

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
    """Threads that decode chunks, and a policy for decompressing chunks to their end.

    Checksums and sizes can only be checked at the end of a chunk.

    Parameters
    ----------
    threads, n_threads
        The threads and their number; the calling thread if None.
    verify
        "first": a chunk is decompressed completely the first time that it is read by this process
        or by another one that was forked from the process that opened its file, and after that only
        as far as its elements are needed; "always": completely each time; "never".
    counters
        Counters of bytes, chunks and time.
    pool
        Memory for lists of kept elements. (Allocating it for each fetch costs more, in page
        faults, than filling it.)
    """

    threads: Executor | None = None
    n_threads: int = 1
    verify: Verify = "first"
    counters: Counters = field(default_factory=Counters)
    pool: BufferPool = field(default_factory=BufferPool)

    def alone(self) -> "Decoder":
        """Return a decoder that works in the calling thread."""
        return Decoder(verify=self.verify, counters=self.counters)

    def map(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Call a function with each item, concurrently."""
        in_turn = map if self.threads is None else self.threads.map
        return list(in_turn(function, items))


def check_verify(verify: Verify) -> Verify:
    """Return how often chunks are checked.

    Raises
    ------
    ParameterError
        It is not "first", "always" or "never".
    """
    if verify not in get_args(Verify):
        modes = ", ".join(map(repr, get_args(Verify)))
        msg = f"`verify` must be one of {modes}, but got {verify!r}"
        raise ParameterError(msg)
    return verify
