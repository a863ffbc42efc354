"""Locations of the chunks of an HDF5 array, from the HDF5 library with a compiled callback.

h5py calls a Python function for each chunk, which takes 1.3 us; the library itself takes
0.2 us. Its function is taken from h5py's own library, so that it is the same HDF5.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil  # the lock that all of h5py takes: HDF5 is not thread-safe
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels

__all__ = ["list_chunks"]

_DEFAULT_TRANSFER = 0  # H5P_DEFAULT


def list_chunks(
    dataset: h5py.Dataset, chunk_shape: Sequence[int], grid: Sequence[int]
) -> NDArray[np.int64]:
    """Return byte offset, size and filter mask of each chunk, in C order of the grid.

    Parameters
    ----------
    dataset
        A chunked dataset.
    chunk_shape, grid
        Shape of a chunk, and number of chunks along each dimension.

    Returns
    -------
    int64, shape (n_chunks, 3); -1 for missing chunks.

    Raises
    ------
    ValueError
        A chunk is outside of the grid or of the file.
    """
    table = np.full((math.prod(grid), kernels.N_LISTED_COLUMNS), -1, np.int64)
    state = np.zeros(kernels.N_STATE, np.int64)
    state[kernels.LISTED], state[kernels.N_DIMENSIONS] = table.ctypes.data, len(grid)
    state[kernels.GRID : kernels.GRID + 2 * len(grid)] = np.stack(
        [chunk_shape, grid], axis=1
    ).ravel()
    iterate = _iterate()
    if iterate is None or iterate(dataset, state) < 0:
        _iterate_in_python(dataset, state, table)  # which has HDF5's words for what is wrong
    if state[kernels.ODD]:
        raise ValueError("it has a chunk outside of the array or of the file")
    return table


@cache
def _iterate() -> Any:
    """Return HDF5's function with the compiled callback; None if h5py does not export it."""
    try:
        iterate = ctypes.CDLL(h5py.h5d.__file__).H5Dchunk_iter
    except (AttributeError, OSError):
        return None
    iterate.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    iterate.restype = ctypes.c_int

    def run(dataset: h5py.Dataset, state: NDArray[np.int64]) -> int:
        try:
            with phil:
                ended: int = iterate(
                    dataset.id.id, _DEFAULT_TRANSFER, kernels.note_chunk.address, state.ctypes.data
                )
        except SystemError as error:  # which ctypes makes of what a file in Python raises
            raise error.__cause__ or error from None
        return ended

    return run


def _iterate_in_python(
    dataset: h5py.Dataset, state: NDArray[np.int64], table: NDArray[np.int64]
) -> None:
    shapes = state[kernels.GRID :].reshape(-1, 2)[: state[kernels.N_DIMENSIONS]].tolist()

    def note(chunk: Any) -> None:
        number = 0
        for first, (length, n) in zip(chunk.chunk_offset, shapes, strict=True):
            if first // length >= n:
                raise ValueError(f"it has a chunk outside of the array, at {chunk.chunk_offset}")
            number = number * n + first // length
        table[number] = chunk.byte_offset, chunk.size, chunk.filter_mask

    dataset.id.chunk_iter(note)
