"""Estimating whether bytes are already in the page cache, so that readahead is not needed."""

import os
from typing import Any

from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels

__all__ = ["seem_to_be_in_memory"]

_FEWEST = 2048  # chunks; to tell the system of fewer takes less than 3 ms
_SAMPLES = 64
_NO_WAITING = getattr(os, "RWF_NOWAIT", 0)  # of Linux


def seem_to_be_in_memory(chunks: NDArray[Any]) -> bool:
    """Return whether chunks of local files seem to be in the page cache, judging by a sample.

    If a tenth of the chunks is not, the answer is wrongly true once in a thousand times. These
    chunks are then read without readahead.

    Parameters
    ----------
    chunks
        A table of the kernels, int64, shape (n_chunks, n_columns).
    """
    if len(chunks) < _FEWEST or not _NO_WAITING:
        return False
    byte = [bytearray(1)]
    for k in range(0, len(chunks), len(chunks) // _SAMPLES):
        fd, flags = int(chunks[k, kernels.FD]), int(chunks[k, kernels.FLAGS])
        if fd < 0 or flags & kernels.IN_MEMORY:
            return False
        try:
            os.preadv(fd, byte, int(chunks[k, kernels.OFFSET]), _NO_WAITING)
        except OSError:  # it would wait, or the file system cannot tell
            return False
    return True
