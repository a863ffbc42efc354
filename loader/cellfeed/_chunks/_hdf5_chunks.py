"""Where the chunks of an HDF5 array lie, asked of the HDF5 library by a compiled callback.

h5py calls a function in Python for each chunk, which takes 1.3 us; the library itself takes
0.2 us. Its function is found in h5py's own library, so that it is the same HDF5.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil  # the lock that all of h5py takes: HDF5 is not thread-safe
from numba import carray, cfunc
from numpy.typing import NDArray

from cellfeed._chunks._native import pointer

__all__ = ["ADDRESS", "FILTER_MASK", "SIZE", "list_chunks"]

ADDRESS, SIZE, FILTER_MASK, N_COLUMNS = range(4)

# What the callback is given: where it writes, and for each dimension the length of a chunk and
# the number of chunks. It gives back whether a chunk was odd.
_TABLE, _N_DIMENSIONS, _ODD, _GRID = range(4)
_MOST_DIMENSIONS = 2
_N_STATE = _GRID + 2 * _MOST_DIMENSIONS

_SIGNATURE = "int32(CPointer(uint64), uint32, uint64, uint64, voidptr)"
_DEFAULT_TRANSFER = 0  # H5P_DEFAULT


def list_chunks(
    dataset: h5py.Dataset, chunk_shape: Sequence[int], grid: Sequence[int]
) -> NDArray[np.int64]:
    """Return byte offset, size and filter mask of each chunk, in C order of the grid.

    Parameters
    ----------
    dataset
        Chunked, of at most two dimensions.
    chunk_shape, grid
        Shape of a chunk, and number of chunks, along each dimension.

    Returns
    -------
    int64, shape (n_chunks, 3); -1 where there is no chunk.

    Raises
    ------
    ValueError
        There is a chunk outside of the grid, or of the file.
    """
    table = np.full((math.prod(grid), N_COLUMNS), -1, np.int64)
    state = np.zeros(_N_STATE, np.int64)
    state[_TABLE], state[_N_DIMENSIONS] = table.ctypes.data, len(grid)
    state[_GRID : _GRID + 2 * len(grid)] = np.stack([chunk_shape, grid], axis=1).ravel()
    iterate = _iterate()
    if iterate is None or iterate(dataset, state) < 0:
        _iterate_in_python(dataset, state, table)  # which has HDF5's words for what is wrong
    if state[_ODD]:
        raise ValueError("there is a chunk outside of the array, or of the file")
    return table


def _note(offset: Any, filter_mask: Any, address: Any, size: Any, state: Any) -> Any:
    """Note a chunk; compiled, so that it is written without anything that could be raised."""
    known = carray(state, (_N_STATE,), np.int64)
    number, n_chunks = np.int64(0), np.int64(1)
    for k in range(known[_N_DIMENSIONS]):
        place = np.int64(offset[k]) // known[_GRID + 2 * k]
        n = known[_GRID + 2 * k + 1]
        if place < 0 or place >= n:
            known[_ODD] = 1
            return np.int32(1)  # which ends the iteration
        number = number * n + place
        n_chunks *= n
    first, n_bytes = np.int64(address), np.int64(size)
    if first < 0 or n_bytes < 0:
        known[_ODD] = 1
        return np.int32(1)
    table = carray(pointer(known[_TABLE]), (n_chunks, N_COLUMNS), np.int64)
    table[number, ADDRESS] = first
    table[number, SIZE] = n_bytes
    table[number, FILTER_MASK] = np.int64(filter_mask)
    return np.int32(0)


@cache
def _iterate() -> Any:
    """Return HDF5's function with the compiled callback, None if h5py does not show it."""
    try:
        iterate = ctypes.CDLL(h5py.h5d.__file__).H5Dchunk_iter
    except (AttributeError, OSError):
        return None
    iterate.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    iterate.restype = ctypes.c_int
    note = cfunc(_SIGNATURE, cache=True)(_note)

    def run(dataset: h5py.Dataset, state: NDArray[np.int64]) -> int:
        with phil:
            ended: int = iterate(dataset.id.id, _DEFAULT_TRANSFER, note.address, state.ctypes.data)
        return ended

    return run


def _iterate_in_python(
    dataset: h5py.Dataset, state: NDArray[np.int64], table: NDArray[np.int64]
) -> None:
    shapes = state[_GRID:].reshape(-1, 2)[: state[_N_DIMENSIONS]].tolist()

    def note(chunk: Any) -> None:
        number = 0
        for first, (length, n) in zip(chunk.chunk_offset, shapes, strict=True):
            if first // length >= n:
                raise ValueError(f"there is a chunk outside of it, at {chunk.chunk_offset}")
            number = number * n + first // length
        table[number] = chunk.byte_offset, chunk.size, chunk.filter_mask

    dataset.id.chunk_iter(note)
