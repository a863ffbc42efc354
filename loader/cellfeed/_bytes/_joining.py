"""Joining ranges that are near each other into one request."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["joined"]

_FILE_BITS = 44  # keep the bytes of different objects apart


def joined(
    files: NDArray[np.int64],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    gap: int,
    largest: int,
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return which ranges are requested together.

    Parameters
    ----------
    files, offsets, sizes
        Number of the object, first byte and number of bytes of each range, int64, shape (n,).
    gap
        Maximum number of bytes between two joined ranges.
    largest
        Maximum number of bytes of a request, unless a single range has more.

    Returns
    -------
    The order of ranges by object and first byte, and the start of each request in this order, with
    the end of the last, shape (n_requests + 1,).
    """
    if not len(files):
        return np.empty(0, np.intp), np.zeros(1, np.intp)
    order = np.lexsort((offsets, files))
    files, offsets, sizes = files[order], offsets[order], sizes[order]
    apart = np.cumsum(np.diff(files, prepend=files[0]) != 0) << _FILE_BITS
    ends = np.maximum.accumulate(offsets + sizes + apart) - apart
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (files[1:] != files[:-1]) | (offsets[1:] - ends[:-1] > gap)
    starts = np.flatnonzero(is_first)
    bounds = [0]
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        # What became too large is divided again, between ranges.
        while ends[end - 1] - offsets[begin] > largest and end - begin > 1:
            fits = ends[begin:end] - offsets[begin] <= largest
            begin += max(1, int(np.count_nonzero(fits)))  # noqa: PLW2901 - what is left of it
            if begin < end:
                bounds.append(begin)
            else:
                break
        bounds.append(end)
    return order, np.unique(np.array(bounds, np.intp))
