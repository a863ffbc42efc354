"""Memory for what is noted of chunks, which processes that are forked from this one share."""

import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["shared_zeros"]

_BLOCK_BYTES = 1 << 16  # arrays are many and small, and a process has few mappings


class _Block:
    """Memory of which pieces are handed out, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            if n_bytes > self._left.size:
                mapped = mmap.mmap(-1, max(1, n_bytes, _BLOCK_BYTES))
                self._left = np.frombuffer(mapped, np.uint8)
            taken, self._left = self._left[:n_bytes], self._left[n_bytes:]
        return taken


_block = _Block()


def _enter_process() -> None:
    """Begin anew in a forked process: what is left here is handed out by its parent."""
    global _block  # noqa: PLW0603 - a thread that is gone may hold its lock
    _block = _Block()


os.register_at_fork(after_in_child=_enter_process)


def shared_zeros(n_bytes: int) -> NDArray[np.uint8]:
    """Return zeros, shape (n_bytes,), which processes that are forked from now on write to too."""
    return _block.take(n_bytes)
