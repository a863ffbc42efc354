"""Reading rows of a one-dimensional array on disk, in few calls."""

from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._runs import Runs

__all__ = ["pick", "runs_with_gaps"]

# Rows that are read in vain cost less than another call of h5py.
_LARGEST_GAP = 1024


def pick(stored: Any, rows: NDArray[np.int64], runs: Runs) -> NDArray[Any]:
    """Return ``stored[rows]`` for an HDF5 or zarr array of numbers or text.

    Parameters
    ----------
    stored
        The array.
    rows
        Ascending rows.
    runs
        `runs_with_gaps` of ``rows``.
    """
    is_text = stored.dtype.kind not in "biuf"
    if is_text and isinstance(stored, h5py.Dataset):
        stored = stored.asstr()
    out = np.empty(rows.size, dtype=object if is_text else stored.dtype.newbyteorder("="))
    bounds = np.searchsorted(rows, runs)
    for (start, stop), (first, last) in zip(runs.tolist(), bounds.tolist(), strict=True):
        out[first:last] = np.asarray(stored[start:stop], dtype=out.dtype)[rows[first:last] - start]
    return out


def runs_with_gaps(rows: NDArray[np.int64]) -> Runs:
    """Return runs that contain ascending ``rows``, and other rows only if that saves a call.

    Examples
    --------
    >>> runs_with_gaps(np.array([3, 5, 9, 5000])).tolist()
    [[3, 10], [5000, 5001]]
    """
    if not rows.size:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(rows) > _LARGEST_GAP)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, rows.size - 1)
    return np.stack([rows[firsts], rows[lasts] + 1], axis=1)
