"""Memory for records about chunks, shared with processes that are forked from this one."""

import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["shared_zeros"]

_BLOCK_BYTES = 1 << 16  # arrays are many and small, and a process has few mappings


class _Block:
    """Memory from which pieces are allocated, one after another."""

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
    """Start a new block in a forked process, since its parent allocates from this one."""
    global _block  # noqa: PLW0603 - a thread that is gone may hold its lock
    _block = _Block()


os.register_at_fork(after_in_child=_enter_process)


def shared_zeros(n_bytes: int) -> NDArray[np.uint8]:
    """Return zeros, uint8, shape (n_bytes,), shared with processes that are forked later."""
    return _block.take(n_bytes)
