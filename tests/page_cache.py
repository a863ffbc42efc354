"""What is in the page cache of files, and dropping it."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_mincore = ctypes.CDLL(None, use_errno=True).mincore


def drop_pages(paths: Sequence[Path]) -> None:
    """Write files to the disk, and drop their pages from the page cache."""
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def share_of_pages(paths: Sequence[Path]) -> float:
    """Return the share of the pages of files that is in the page cache."""
    states = list[NDArray[np.uint8]]()
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            content = np.frombuffer(mapped, np.uint8)
            state = np.zeros(-(-content.size // mmap.PAGESIZE), np.uint8)
            address, n_bytes = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.size)
            assert _mincore(address, n_bytes, ctypes.c_void_p(state.ctypes.data)) == 0
            states.append((state & 1).astype(np.uint8))
            del content
    return float(np.concatenate(states).mean())
