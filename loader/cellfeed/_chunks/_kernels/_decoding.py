"""Compiled: reading, decompressing and placing chunks in many threads."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks._kernels._decompression import decompress, is_compressed, unshuffle
from cellfeed._chunks._kernels._delta import add_up
from cellfeed._chunks._kernels._heads import decompress_head, mark_checked, wanted_bytes
from cellfeed._chunks._kernels._native import (
    CLOCK,
    DEFLATE_FREE,
    DEFLATE_NEW,
    ZSTD_FREE,
    ZSTD_NEW,
    atomic_add,
    call,
    finish_streams,
    nanoseconds,
)
from cellfeed._chunks._kernels._placing import place_segments
from cellfeed._chunks._kernels._reading import read_ahead
from cellfeed._chunks._kernels._tables import (
    ABSENT,
    ARRAY,
    COUNT,
    DECODED_BYTES,
    DECOMPRESSED,
    DECOMPRESSING,
    DELTA,
    END_SEGMENT,
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
    NEXT_TASK,
    NOT_PLACED,
    OFFSET,
    PLACING,
    PLACING_ELEMENTS,
    READING,
    SCATTERED,
    SHUFFLED,
    UNSHUFFLED,
)
from cellfeed._compiled import compiled

__all__ = ["CHUNKS_OF_A_TASK", "decode"]

CHUNKS_OF_A_TASK = 8

_int64_2d = "int64[:,::1]"


@compiled("boolean(int64[::1], int64[:,::1])")
def _may_be_lost(array: NDArray[np.int64], segments: NDArray[np.int64]) -> bool:
    """Return whether these elements may be zeros that were therefore never written."""
    if array[LOST_IS_ZERO]:
        return True
    # No row has more than one element of column 0.
    return bool(array[INDEX_LIMIT] >= 0 and np.all(segments[:, COUNT] <= 1))


@compiled("void(int64[:,::1], int64[::1], uint8[::1])")
def _take_zeros(
    segments: NDArray[np.int64], array: NDArray[np.int64], buffer: NDArray[np.uint8]
) -> None:
    """Let all segments begin at the same zeros, as many as the longest segment needs."""
    if array[PLACING] == SCATTERED:
        buffer[: array[DECODED_BYTES]] = 0
        return
    longest = 0
    for k in range(len(segments)):
        segments[k, FROM] = 0
        longest = max(longest, segments[k, COUNT])
    buffer[: longest * array[ITEMSIZE]] = 0


@compiled("int64(int64[::1], int64[::1], int64[:,::1], int64, int64, int64)")
def _unfiltered(
    array: NDArray[np.int64],
    chunk: NDArray[np.int64],
    segments: NDArray[np.int64],
    source: int,
    decoded: int,
    unshuffled: int,
) -> int:
    """Return the address of the elements of a chunk that is not, or no longer, compressed."""
    if array[SHUFFLED] and not chunk[FLAGS] & UNSHUFFLED:
        unshuffle(source, array[DECODED_BYTES], unshuffled, array[ITEMSIZE])
        source = unshuffled
    if array[DELTA]:
        add_up(source, decoded, segments, array)
        source = decoded
    return source


@compiled(
    "Tuple((int64, int64))(int64[::1], int64[::1], int64[:,::1], UniTuple(int64, 4), int64[::1])"
)
def _decompress_as_wanted(
    array: NDArray[np.int64],
    chunk: NDArray[np.int64],
    segments: NDArray[np.int64],
    addresses: tuple[int, int, int, int],
    functions: NDArray[np.int64],
) -> Any:
    """Decompress a chunk, if it is compressed, as far as needed.

    Parameters
    ----------
    array, chunk, segments
        Rows of the tables.
    addresses
        Addresses of its bytes, of the output, and of the decompressors with a state.
    functions
        Addresses of the C functions.

    Returns
    -------
    A failure, 0 if none, and the number of decompressed bytes.
    """
    source, target, zlib, zstd = addresses
    if not is_compressed(array, chunk):
        return decompress(array, chunk, source, target, functions, zlib, zstd), 0
    wanted = wanted_bytes(array, chunk, segments)
    if wanted < array[DECODED_BYTES]:
        n = decompress_head(array, chunk, source, target, wanted, functions, zlib, zstd)
        if n:
            return 0, n
    failure = decompress(array, chunk, source, target, functions, zlib, zstd)
    if failure == 0:
        mark_checked(array, chunk)
    return failure, array[DECODED_BYTES]


@compiled(
    f"int64({_int64_2d}, {_int64_2d}, {_int64_2d}, int64[::1], int64[::1], "
    "uint8[::1], uint8[::1], uint8[::1], uint8[::1])"
)
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
        The tables; ``chunks`` contains only the chunks to decode now.
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
    n_chunks = len(chunks)
    raw, decoded, unshuffled = (
        raw_buffer.ctypes.data,
        decoded_buffer.ctypes.data,
        unshuffled_buffer.ctypes.data,
    )
    zlib = call(functions[DEFLATE_NEW], ()) if functions[DEFLATE_NEW] else 0
    zstd = call(functions[ZSTD_NEW], ()) if functions[ZSTD_NEW] else 0
    clock = functions[CLOCK]
    n_read = n_decompressed = reading = decompressing = placing = 0
    now = nanoseconds(clock)
    while report[FAILURE] == 0:
        first = atomic_add(report.ctypes.data + NEXT_TASK * 8, CHUNKS_OF_A_TASK)
        if first >= n_chunks:
            break
        stop = min(first + CHUNKS_OF_A_TASK, n_chunks)
        begin = end = first  # chunks whose bytes have been read
        for c in range(first, stop):
            failure = 0
            array = arrays[chunks[c, ARRAY]]
            if c >= end:
                begin = c
                expected = array[DECODED_BYTES]
                failure, end, n = read_ahead(chunks, c, stop, raw, expected, functions)
                n_read += n
                before, now = now, nanoseconds(clock)
                reading += now - before
            in_memory = chunks[c, FLAGS] & IN_MEMORY
            here = chunks[c, OFFSET] + (0 if in_memory else raw - chunks[begin, OFFSET])
            own = segments[chunks[c, FIRST_SEGMENT] : chunks[c, END_SEGMENT]]
            absent = failure == 0 and chunks[c, FLAGS] & ABSENT
            if failure == MISSING or chunks[c, FLAGS] & LOST:
                absent = _may_be_lost(array, own)
                failure = 0 if absent else MISSING
            if absent:
                _take_zeros(own, array, decoded_buffer)
                here = decoded
            elif failure == 0:
                places = (here, decoded, zlib, zstd)
                failure, n = _decompress_as_wanted(array, chunks[c], own, places, functions)
                n_decompressed += n
                here = decoded if is_compressed(array, chunks[c]) else here
                if failure == 0:
                    here = _unfiltered(array, chunks[c], own, here, decoded, unshuffled)
            before, now = now, nanoseconds(clock)
            decompressing += now - before
            if failure == 0 and not array[NOT_PLACED]:
                scratch, is_ours = scratch_buffer.ctypes.data, int(here in (decoded, unshuffled))
                failure = place_segments(here, own, array, report, scratch, is_ours)
                before, now = now, nanoseconds(clock)
                placing += now - before
            if failure:
                report[FAILED_CHUNK] = c
                report[FAILURE] = failure
                break
    finish_streams()
    atomic_add(report.ctypes.data + DECOMPRESSED * 8, n_decompressed)
    atomic_add(report.ctypes.data + READING * 8, reading)
    atomic_add(report.ctypes.data + DECOMPRESSING * 8, decompressing)
    atomic_add(report.ctypes.data + PLACING_ELEMENTS * 8, placing)
    if zlib:
        call(functions[DEFLATE_FREE], (zlib,))
    if zstd:
        call(functions[ZSTD_FREE], (zstd,))
    return n_read
