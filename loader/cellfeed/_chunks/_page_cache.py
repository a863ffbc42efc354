"""Whether bytes that will be read are in memory already, so that the system need not be told."""

import os
from typing import Any

from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels

__all__ = ["seem_to_be_in_memory"]

_FEWEST = 2048  # chunks; to tell the system of fewer takes less than 3 ms
_SAMPLES = 64
_NO_WAITING = getattr(os, "RWF_NOWAIT", 0)  # of Linux


def seem_to_be_in_memory(chunks: NDArray[Any]) -> bool:
    """Return whether many chunks of local files are all in the page cache, as far as a few tell.

    Of chunks of which a tenth is not, it says so but once in a thousand times. These are then
    read as they come, not side by side.

    Parameters
    ----------
    chunks
        As the kernels take them, int64, shape (n_chunks, n_columns).
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
