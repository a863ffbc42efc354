"""Compiled: reading the bytes of chunks, adjacent chunks with one call."""

import errno
import os
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._chunks._kernels._functions import (
    CLOSE,
    ERRNO,
    FADVISE,
    OPEN,
    PREAD,
    SEEK,
)
from cellfeed._chunks._kernels._native import (
    call,
    pointer,
)
from cellfeed._chunks._kernels._tables import (
    FD,
    FLAGS,
    IN_MEMORY,
    LARGEST_READ,
    MISSING,
    OFFSET,
    OWN_FILE,
    SIZE,
    TRUNCATED,
    UNREADABLE,
    WHOLE_FILE,
    WRONG_SIZE,
)
from cellfeed._compiled import compiled

__all__ = ["advise", "read_ahead"]

_LARGEST_GAP = 1 << 14  # reading this many unneeded bytes costs less than another system call
_MOST_TRIES = 3
_WILL_NEED = 3
_FROM_END = 2
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_OF_LINK = os.O_CLOEXEC | (  # opens a link itself
    os.O_PATH | os.O_NOFOLLOW if hasattr(os, "O_PATH") else getattr(os, "O_SYMLINK", 0)
)
_NO_SUCH_FILE = errno.ENOENT

_int64_2d = "int64[:,::1]"


@compiled(f"Tuple((int64, int64))({_int64_2d}, int64, int64)", inner=True)
def _extent(chunks: NDArray[np.int64], first: int, stop: int) -> Any:
    """Return the first chunk after one read, and the number of bytes of the read."""
    begin = chunks[first, OFFSET]
    end = begin + chunks[first, SIZE]
    last = first + 1
    if end == begin:  # the chunk does not exist
        return last, 0
    if chunks[first, FLAGS] & IN_MEMORY:
        return last, end - begin
    while last < stop:
        offset = chunks[last, OFFSET]
        near = end <= offset <= end + _LARGEST_GAP and chunks[last, FD] == chunks[first, FD]
        near = near and not chunks[last, FLAGS] & IN_MEMORY
        if not near or offset + chunks[last, SIZE] - begin > LARGEST_READ:
            break
        end = offset + chunks[last, SIZE]
        last += 1
    return last, end - begin


@compiled(f"void({_int64_2d}, int64[::1])")
def advise(chunks: NDArray[np.int64], functions: NDArray[np.int64]) -> None:
    """Tell the system which bytes will be read, so that it fetches them concurrently."""
    if functions[FADVISE] == 0:
        return
    i = 0
    while i < len(chunks):
        last, size = _extent(chunks, i, len(chunks))
        if size and chunks[i, FD] >= 0 and not chunks[i, FLAGS] & IN_MEMORY:
            call(functions[FADVISE], (chunks[i, FD], chunks[i, OFFSET], size, _WILL_NEED))
        i = last


@compiled("Tuple((int64, int64))(int64, int64, int64, int64, int64[::1])", inner=True)
def _read(fd: int, target: int, size: int, offset: int, functions: NDArray[np.int64]) -> Any:
    """Read ``size`` bytes, or up to the end of the file; return a failure, and the bytes read."""
    done = interrupted = 0
    while done < size:
        n = call(functions[PREAD], (fd, target + done, size - done, offset + done))
        if n == 0:
            return TRUNCATED, done
        if n < 0:
            # An interrupted call cannot be told from another failure here, so it is retried.
            interrupted += 1
            if interrupted > _MOST_TRIES:
                return UNREADABLE, done
            continue
        done += n
    return 0, done


@compiled("Tuple((int64, int64))(int64, int64, int64[::1])", inner=True)
def _open(path: int, flags: int, functions: NDArray[np.int64]) -> Any:
    """Open the file whose path is at this address; return a failure, and the descriptor."""
    fd = np.int64(np.int32(call(functions[OPEN], (path, flags))))
    if fd >= 0:
        return 0, fd
    number = carray(pointer(call(functions[ERRNO], ())), (1,), np.int32)[0]
    if number != _NO_SUCH_FILE:
        return UNREADABLE, fd
    link = np.int64(np.int32(call(functions[OPEN], (path, _OF_LINK))))
    if link < 0:
        return MISSING, fd
    call(functions[CLOSE], (link,))
    return UNREADABLE, fd  # what a link leads to is missing, which is not zero


@compiled("Tuple((int64, int64))(int64[::1], int64, int64, int64, int64[::1])", inner=True)
def _read_from(
    chunk: NDArray[np.int64], target: int, size: int, expected: int, functions: NDArray[np.int64]
) -> Any:
    """Read bytes from the beginning of a chunk; return a failure, and the bytes read."""
    if size == 0:
        return 0, 0
    fd = chunk[FD]
    if fd < 0:
        failure, fd = _open(-fd, _OPEN_FLAGS, functions)
        if failure:
            return failure, 0
    failure, n = _read(fd, target, size, chunk[OFFSET], functions)
    if failure == 0 and chunk[FLAGS] & OWN_FILE:
        is_right = call(functions[SEEK], (fd, 0, _FROM_END)) == expected
        failure = 0 if is_right else WRONG_SIZE
    if chunk[FD] < 0:
        call(functions[CLOSE], (fd,))
    if chunk[FLAGS] & WHOLE_FILE:
        chunk[SIZE] = n
        failure = 0 if failure == TRUNCATED else failure
    return failure, n


@compiled(
    f"Tuple((int64, int64, int64))({_int64_2d}, int64, int64, int64, int64, int64[::1])", inner=True
)
def read_ahead(
    chunks: NDArray[np.int64],
    first: int,
    stop: int,
    target: int,
    expected: int,
    functions: NDArray[np.int64],
) -> Any:
    """Read a chunk and adjacent ones; return a failure, the first chunk after them, and bytes."""
    end, size = _extent(chunks, first, stop)
    if chunks[first, FLAGS] & IN_MEMORY:
        return 0, end, size
    failure, n = _read_from(chunks[first], target, size, expected, functions)
    if failure and end > first + 1:  # find out which chunk fails
        end = first + 1
        failure, n = _read_from(chunks[first], target, chunks[first, SIZE], expected, functions)
    return failure, end, n
