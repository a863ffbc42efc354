"""Compiled: reading, decompressing and placing chunks in many threads."""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._chunks._kernels._codecs import STORED
from cellfeed._chunks._kernels._decompression import decompressor, unshuffler
from cellfeed._chunks._kernels._delta import adder
from cellfeed._chunks._kernels._functions import (
    CLOCK,
    DEFLATE_FREE,
    DEFLATE_NEW,
    ZSTD_FREE,
    ZSTD_NEW,
)
from cellfeed._chunks._kernels._native import (
    atomic_add,
    call,
    clear_bytes,
    finish_streams,
    nanoseconds,
    pointer,
)
from cellfeed._chunks._kernels._placing import placer
from cellfeed._chunks._kernels._planning import extent
from cellfeed._chunks._kernels._reading import read_ahead
from cellfeed._chunks._kernels._tables import (
    ABSENT,
    ADD_UP,
    ARRAY,
    CHECKED,
    CHUNKS_OF_A_TASK,
    CODEC,
    COUNT,
    DECODED_BYTES,
    DECOMPRESS,
    DECOMPRESSED,
    DECOMPRESSING,
    DELTA,
    END_SEGMENT,
    EVERY_TIME,
    FAILED_CHUNK,
    FAILURE,
    FIRST_SEGMENT,
    FLAGS,
    FROM,
    IN_MEMORY,
    INDEX_LIMIT,
    ITEMSIZE,
    LOST,
    LOST_IS_ZERO,
    MISSING,
    NEVER,
    NEXT_TASK,
    NOT_PLACED,
    NUMBER,
    OFFSET,
    PLACE,
    PLACING,
    PLACING_ELEMENTS,
    READING,
    SCATTERED,
    SHUFFLED,
    SIZE,
    UNCOMPRESSED,
    UNSHUFFLE,
    UNSHUFFLED,
    WRONG_SIZE,
)
from cellfeed._compiled import compiled

__all__ = ["decode", "head_sizes"]

_int64_2d = "int64[:,::1]"


def decode(
    arrays: NDArray[np.int64],
    chunks: NDArray[np.int64],
    segments: NDArray[np.int64],
    functions: NDArray[np.int64],
    report: NDArray[np.int64],
    raw_buffer: NDArray[np.uint8],
    decoded_buffer: NDArray[np.uint8],
    unshuffled_buffer: NDArray[np.uint8],
    scratch_buffer: NDArray[np.uint8],
) -> int:
    """Read, decompress and place chunks until none is left; several threads share one report.

    Parameters
    ----------
    arrays, chunks, segments
        The tables; ``chunks`` contains only the chunks to decode now. The functions that they need
        are compiled, or loaded, and their addresses written to ``arrays``.
    functions
        Addresses of the C functions.
    report
        Shared by all threads that decode these tables.
    raw_buffer, decoded_buffer, unshuffled_buffer, scratch_buffer
        Buffers for the bytes of one read, a decompressed chunk, an unshuffled chunk, and, if
        elements are cast before they are placed, a chunk of cast elements; each thread has its own.
        (They are arguments since a compiled function frees its own arrays after their last use by
        name, even if their address is still in use.)

    Returns
    -------
    Number of bytes that this thread read.
    """
    for column, kind, address_of in ((DECOMPRESS, CODEC, decompressor), (PLACE, PLACING, placer)):
        for each in np.unique(arrays[:, kind]).tolist():
            arrays[arrays[:, kind] == each, column] = address_of(each)
    if arrays[:, SHUFFLED].any():
        arrays[:, UNSHUFFLE] = unshuffler.address
    if arrays[:, DELTA].any():
        arrays[:, ADD_UP] = adder.address
    buffers = (raw_buffer, decoded_buffer, unshuffled_buffer, scratch_buffer)
    return int(_decode(arrays, chunks, segments, functions, report, *buffers))


@compiled("boolean(int64[::1], int64[::1])", inner=True)
def _is_compressed(array: NDArray[np.int64], chunk: NDArray[np.int64]) -> bool:
    """Return whether a chunk is compressed."""
    return array[CODEC] != STORED and not chunk[FLAGS] & UNCOMPRESSED


@compiled("boolean(int64[::1], int64[::1])", inner=True)
def _is_checked(array: NDArray[np.int64], chunk: NDArray[np.int64]) -> bool:
    """Return whether a chunk may be decompressed partially."""
    if array[CHECKED] == EVERY_TIME or array[CHECKED] == NEVER:
        return bool(array[CHECKED] == NEVER)
    bits = carray(pointer(array[CHECKED] + (chunk[NUMBER] >> 3)), (1,), np.uint8)
    return bool((bits[0] >> (chunk[NUMBER] & 7)) & 1)


@compiled("void(int64[::1], int64[::1])", inner=True)
def _mark_checked(array: NDArray[np.int64], chunk: NDArray[np.int64]) -> None:
    """Record that a chunk was decompressed completely.

    If two threads mark adjacent chunks at the same time, one mark may be lost; that chunk is then
    decompressed completely once more.
    """
    if array[CHECKED] == EVERY_TIME or array[CHECKED] == NEVER:
        return
    bits = carray(pointer(array[CHECKED] + (chunk[NUMBER] >> 3)), (1,), np.uint8)
    bits[0] |= np.uint8(1 << (chunk[NUMBER] & 7))


@compiled("int64(int64[::1], int64[::1], int64[:,::1])", inner=True)
def _wanted_bytes(
    array: NDArray[np.int64], chunk: NDArray[np.int64], segments: NDArray[np.int64]
) -> int:
    """Return how many bytes of a chunk, from its first, have to be decompressed."""
    whole = array[DECODED_BYTES]
    is_shuffled = array[SHUFFLED] and not chunk[FLAGS] & UNSHUFFLED
    if is_shuffled or not _is_compressed(array, chunk) or not _is_checked(array, chunk):
        return int(whole)
    n_elements = 0
    for k in range(len(segments)):
        _, stop = extent(segments[k], array[PLACING])
        n_elements = max(n_elements, stop)
    return int(min(whole, n_elements * array[ITEMSIZE]))


@compiled("int64[::1](int64[:,::1], int64[:,::1], int64[:,::1])")
def head_sizes(
    arrays: NDArray[np.int64], chunks: NDArray[np.int64], segments: NDArray[np.int64]
) -> Any:
    """Return how many bytes of each chunk have to be decompressed, shape (n_chunks,)."""
    sizes = np.empty(len(chunks), np.int64)
    for c in range(len(chunks)):
        own = segments[chunks[c, FIRST_SEGMENT] : chunks[c, END_SEGMENT]]
        sizes[c] = _wanted_bytes(arrays[chunks[c, ARRAY]], chunks[c], own)
    return sizes


@compiled("boolean(int64[::1], int64[:,::1], int64, int64)", inner=True)
def _take_zeros(
    array: NDArray[np.int64], segments: NDArray[np.int64], buffer: int, is_lost: int
) -> bool:
    """Let all segments begin at the same zeros, as many as the longest segment needs.

    Returns
    -------
    False if the chunk is lost, and elements may be others than zeros that were never written.
    """
    longest = 0
    for k in range(len(segments)):
        longest = max(longest, segments[k, COUNT])
    # No row has more than one element of column 0.
    may_be_zeros = array[LOST_IS_ZERO] or (array[INDEX_LIMIT] >= 0 and longest <= 1)
    if is_lost and not may_be_zeros:
        return False
    if array[PLACING] == SCATTERED:
        clear_bytes(buffer, array[DECODED_BYTES])
        return True
    for k in range(len(segments)):
        segments[k, FROM] = 0
    clear_bytes(buffer, longest * array[ITEMSIZE])
    return True


@compiled(
    f"int64({_int64_2d}, {_int64_2d}, {_int64_2d}, int64[::1], int64[::1], "
    "uint8[::1], uint8[::1], uint8[::1], uint8[::1])"
)
def _decode(  # noqa: PLR0912 - one loop over chunks
    arrays: NDArray[np.int64],
    chunks: NDArray[np.int64],
    segments: NDArray[np.int64],
    functions: NDArray[np.int64],
    report: NDArray[np.int64],
    raw_buffer: NDArray[np.uint8],
    decoded_buffer: NDArray[np.uint8],
    unshuffled_buffer: NDArray[np.uint8],
    scratch_buffer: NDArray[np.uint8],
) -> int:
    """Do what `decode` does, with the functions whose addresses are in ``arrays``."""
    n_chunks = len(chunks)
    # Addresses are signed here; numba makes floats of signed and unsigned numbers together.
    raw, decoded = np.int64(raw_buffer.ctypes.data), np.int64(decoded_buffer.ctypes.data)
    unshuffled = np.int64(unshuffled_buffer.ctypes.data)
    scratch, reported = scratch_buffer.ctypes.data, report.ctypes.data
    of_functions = functions.ctypes.data
    zlib = call(functions[DEFLATE_NEW], ()) if functions[DEFLATE_NEW] else 0
    zstd = call(functions[ZSTD_NEW], ()) if functions[ZSTD_NEW] else 0
    clock = functions[CLOCK]
    n_read = n_decompressed = reading = decompressing = placing = 0
    now = nanoseconds(clock)
    while report[FAILURE] == 0:
        first = atomic_add(reported + NEXT_TASK * 8, CHUNKS_OF_A_TASK)
        if first >= n_chunks:
            break
        stop = min(first + CHUNKS_OF_A_TASK, n_chunks)
        begin = end = first  # chunks whose bytes have been read
        for c in range(first, stop):
            failure = 0
            chunk, array = chunks[c], arrays[chunks[c, ARRAY]]
            size = array[DECODED_BYTES]
            if c >= end:
                begin = c
                failure, end, n = read_ahead(chunks, c, stop, raw, size, functions)
                n_read += n
                before, now = now, nanoseconds(clock)
                reading += now - before
            here = chunk[OFFSET]
            if not chunk[FLAGS] & IN_MEMORY:
                here += raw - chunks[begin, OFFSET]
            own = segments[chunk[FIRST_SEGMENT] : chunk[END_SEGMENT]]
            is_lost = failure == MISSING or chunk[FLAGS] & LOST != 0
            if is_lost or (failure == 0 and chunk[FLAGS] & ABSENT):
                failure = 0 if _take_zeros(array, own, decoded, is_lost) else MISSING
                here = decoded
            elif failure == 0:
                is_filtered = array[SHUFFLED] or array[DELTA]
                if _is_compressed(array, chunk):
                    wanted = _wanted_bytes(array, chunk, own)
                    stored = chunk[SIZE]
                    compressed = (here, stored, decoded, size, wanted, of_functions, zlib, zstd)
                    n = call(array[DECOMPRESS], compressed)
                    if n < 0:
                        failure, n = -n, size
                    elif n == size:
                        _mark_checked(array, chunk)
                    n_decompressed += n
                    here = decoded
                # Uncompressed chunks were cut to the wanted elements, unless they are filtered.
                elif (array[CODEC] != STORED or is_filtered) and chunk[SIZE] != size:
                    failure = WRONG_SIZE
                if is_filtered and failure == 0:
                    if array[SHUFFLED] and not chunk[FLAGS] & UNSHUFFLED:
                        call(array[UNSHUFFLE], (here, size, unshuffled, array[ITEMSIZE]))
                        here = unshuffled
                    if array[DELTA]:
                        tables = own.ctypes.data, array.ctypes.data
                        call(array[ADD_UP], (here, decoded, tables[0], len(own), tables[1]))
                        here = decoded
            before, now = now, nanoseconds(clock)
            decompressing += now - before
            if failure == 0 and not array[NOT_PLACED]:
                is_ours = int(here in (decoded, unshuffled))
                tables = own.ctypes.data, array.ctypes.data
                arguments = (here, tables[0], len(own), tables[1], reported, scratch, is_ours)
                failure = call(array[PLACE], arguments)
                before, now = now, nanoseconds(clock)
                placing += now - before
            if failure:
                report[FAILED_CHUNK] = c
                report[FAILURE] = failure
                break
    finish_streams()
    atomic_add(reported + DECOMPRESSED * 8, n_decompressed)
    atomic_add(reported + READING * 8, reading)
    atomic_add(reported + DECOMPRESSING * 8, decompressing)
    atomic_add(reported + PLACING_ELEMENTS * 8, placing)
    if zlib:
        call(functions[DEFLATE_FREE], (zlib,))
    if zstd:
        call(functions[ZSTD_FREE], (zstd,))
    return n_read
