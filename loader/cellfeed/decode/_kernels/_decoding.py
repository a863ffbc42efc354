"""Compiled: reading, decompressing and placing chunks in many threads."""

import errno
import os
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.decode._kernels import _codecs as codecs
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._decompression import adder, decompressor, unshuffle
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import (
    address_of,
    atomic_add,
    call,
    clear_bytes,
    elements,
    finish_streams,
    int32_at,
    nanoseconds,
    pointer_to,
    row_of,
)
from cellfeed.decode._kernels._placing import extent, placer

# Compiled: reading the bytes of chunks, adjacent chunks with one call.

_LARGEST_GAP = 1 << 14  # reading this many unneeded bytes costs less than another system call
_MOST_TRIES = 3
_WILL_NEED = 3
_FROM_END = 2
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe is empty, without waiting
_OF_LINK = os.O_CLOEXEC | (  # opens a link itself
    os.O_PATH | os.O_NOFOLLOW if hasattr(os, "O_PATH") else getattr(os, "O_SYMLINK", 0)
)
_NO_SUCH_FILE = errno.ENOENT

_Bytes: TypeAlias = NDArray[np.uint8]
_int64_2d = "int64[:,::1]"


@compiled("CPointer(int64)(int64, int64)", inner=True)
def _chunk(chunks_at: int, number: int) -> Any:
    """Return a row of the table of chunks."""
    return row_of(chunks_at, number, fields.N_CHUNK_COLUMNS)


@compiled("UniTuple(int64, 2)(int64, int64, int64)", inner=True)
def _extent(chunks_at: int, first: int, stop: int) -> Any:
    """Return the first chunk after one read, and the number of bytes of the read."""
    chunk = _chunk(chunks_at, first)
    begin, fd = chunk[fields.OFFSET], chunk[fields.FD]
    end = begin + chunk[fields.SIZE]
    last = first + 1
    if end == begin:  # the chunk does not exist
        return last, 0
    if chunk[fields.FLAGS] & fields.IN_MEMORY:
        return last, end - begin
    while last < stop:
        chunk = _chunk(chunks_at, last)
        offset = chunk[fields.OFFSET]
        near = end <= offset <= end + _LARGEST_GAP and chunk[fields.FD] == fd
        near = near and not chunk[fields.FLAGS] & fields.IN_MEMORY
        if not near or offset + chunk[fields.SIZE] - begin > fields.LARGEST_READ:
            break
        end = offset + chunk[fields.SIZE]
        last += 1
    return last, end - begin


@compiled(f"void({_int64_2d}, int64[::1])")
def advise(chunks: Ints, functions: Ints) -> None:
    """Tell the system which bytes will be read, so that it fetches them concurrently."""
    if functions[codecs.FADVISE] == 0:
        return
    i, n_chunks = 0, len(chunks)
    table_at = address_of(chunks)
    while i < n_chunks:
        last, size = _extent(table_at, i, n_chunks)
        chunk = _chunk(table_at, i)
        if size and chunk[fields.FD] >= 0 and not chunk[fields.FLAGS] & fields.IN_MEMORY:
            call(
                functions[codecs.FADVISE],
                (chunk[fields.FD], chunk[fields.OFFSET], size, _WILL_NEED),
            )
        i = last


@compiled("UniTuple(int64, 2)(int64, int64, int64, int64, CPointer(int64))", inner=True)
def _read(fd: int, target: int, size: int, offset: int, functions: Ints) -> Any:
    """Read ``size`` bytes, or up to the end of the file; return a failure, and the bytes read."""
    done = interrupted = 0
    while done < size:
        n = call(functions[codecs.PREAD], (fd, target + done, size - done, offset + done))
        if n == 0:
            return fields.TRUNCATED, done
        if n < 0:
            # An interrupted call cannot be told from another failure here, so it is retried.
            interrupted += 1
            if interrupted > _MOST_TRIES:
                return fields.UNREADABLE, done
            continue
        done += n
    return 0, done


@compiled("UniTuple(int64, 2)(int64, int64, CPointer(int64))", inner=True)
def _open(path: int, flags: int, functions: Ints) -> Any:
    """Open the file whose path is at this address; return a failure, and the descriptor."""
    fd = np.int64(np.int32(call(functions[codecs.OPEN], (path, flags))))
    if fd >= 0:
        return 0, fd
    number = elements(call(functions[codecs.ERRNO], ()), np.int32)[0]
    if number != _NO_SUCH_FILE:
        return fields.UNREADABLE, fd
    link = np.int64(np.int32(call(functions[codecs.OPEN], (path, _OF_LINK))))
    if link < 0:
        return fields.MISSING, fd
    call(functions[codecs.CLOSE], (link,))
    return fields.UNREADABLE, fd  # what a link leads to is missing, which is not zero


@compiled("UniTuple(int64, 2)(CPointer(int64), int64, int64, int64, CPointer(int64))", inner=True)
def _read_from(chunk: Ints, target: int, size: int, expected: int, functions: Ints) -> Any:
    """Read bytes from the beginning of a chunk; return a failure, and the bytes read."""
    if size == 0:
        return 0, 0
    fd = chunk[fields.FD]
    if fd < 0:
        failure, fd = _open(-fd, _OPEN_FLAGS, functions)
        if failure:
            return failure, 0
    failure, n = _read(fd, target, size, chunk[fields.OFFSET], functions)
    if failure == 0 and chunk[fields.FLAGS] & fields.OWN_FILE:
        is_right = call(functions[codecs.SEEK], (fd, 0, _FROM_END)) == expected
        failure = 0 if is_right else fields.WRONG_SIZE
    if chunk[fields.FD] < 0:
        call(functions[codecs.CLOSE], (fd,))
    if chunk[fields.FLAGS] & fields.WHOLE_FILE:
        chunk[fields.SIZE] = n
        failure = 0 if failure == fields.TRUNCATED else failure
    return failure, n


@compiled("UniTuple(int64, 3)(int64, int64, int64, int64, int64, CPointer(int64))", inner=True)
def _read_ahead(
    chunks_at: int, first: int, stop: int, target: int, expected: int, functions: Ints
) -> Any:
    """Read a chunk and adjacent ones; return a failure, the first chunk after them, and bytes."""
    chunk, (end, size) = _chunk(chunks_at, first), _extent(chunks_at, first, stop)
    if chunk[fields.FLAGS] & fields.IN_MEMORY:
        return 0, end, size
    failure, n = _read_from(chunk, target, size, expected, functions)
    if failure and end > first + 1:  # find out which chunk fails
        end = first + 1
        failure, n = _read_from(chunk, target, chunk[fields.SIZE], expected, functions)
    return failure, end, n


def resolve(arrays: Ints) -> None:
    """Write to a table of arrays the addresses of the functions that they need.

    The functions are compiled, or loaded.
    """
    for column, kind, function_of in (
        (fields.DECOMPRESS, fields.CODEC, decompressor),
        (fields.PLACE, fields.PLACING, placer),
    ):
        for each in np.unique(arrays[:, kind]).tolist():
            arrays[arrays[:, kind] == each, column] = function_of(each)
    if arrays[:, fields.SHUFFLED].any():
        arrays[:, fields.UNSHUFFLE] = unshuffle.address
    if arrays[:, fields.DELTA].any():
        arrays[:, fields.ADD_UP] = adder.address


@compiled("boolean(CPointer(int64), CPointer(int64))", inner=True)
def _is_compressed(array: Ints, chunk: Ints) -> bool:
    """Return whether a chunk is compressed."""
    return array[fields.CODEC] != codecs.STORED and not chunk[fields.FLAGS] & fields.UNCOMPRESSED


@compiled("boolean(CPointer(int64), CPointer(int64))", inner=True)
def _is_checked(array: Ints, chunk: Ints) -> bool:
    """Return whether a chunk may be decompressed partially."""
    if array[fields.CHECKED] == fields.EVERY_TIME or array[fields.CHECKED] == fields.NEVER:
        return bool(array[fields.CHECKED] == fields.NEVER)
    bits = elements(array[fields.CHECKED] + (chunk[fields.NUMBER] >> 3), np.uint8)
    return bool((bits[0] >> (chunk[fields.NUMBER] & 7)) & 1)


@compiled("int64(int64, int64, CPointer(int64))", inner=True)
def _verify(address: int, size: int, functions: Ints) -> int:
    """Compare the CRC32C of ``size`` bytes with that which follows them; return a failure."""
    if size < 0:
        return fields.TRUNCATED
    found = np.int32(call(functions[codecs.CRC32C], (address, size)))
    return 0 if found == int32_at(address + size) else fields.WRONG_CHECKSUM


@compiled("void(CPointer(int64), CPointer(int64))", inner=True)
def _mark_checked(array: Ints, chunk: Ints) -> None:
    """Record that a chunk was decompressed completely, and its checksum verified.

    If two threads mark adjacent chunks at the same time, one mark may be lost; that chunk is then
    decompressed completely once more.
    """
    if array[fields.CHECKED] == fields.EVERY_TIME or array[fields.CHECKED] == fields.NEVER:
        return
    bits = elements(array[fields.CHECKED] + (chunk[fields.NUMBER] >> 3), np.uint8)
    bits[0] |= np.uint8(1 << (chunk[fields.NUMBER] & 7))


@compiled("UniTuple(int64, 2)(CPointer(int64), CPointer(int64), int64, int64)", inner=True)
def _wanted_bytes(array: Ints, chunk: Ints, segments_at: int, n_segments: int) -> Any:
    """Return the first byte of a chunk that has to be decompressed, and the one after the last.

    The first is not 0 for Blosc only, and not if elements are stored as differences.
    """
    whole, itemsize = array[fields.DECODED_BYTES], array[fields.ITEMSIZE]
    is_shuffled = array[fields.SHUFFLED] and not chunk[fields.FLAGS] & fields.UNSHUFFLED
    if is_shuffled or not _is_compressed(array, chunk) or not _is_checked(array, chunk):
        return 0, whole
    lowest, highest = whole, np.int64(0)
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        first, stop = extent(segment, array[fields.PLACING])
        lowest, highest = min(lowest, first * itemsize), max(highest, stop * itemsize)
    is_random = array[fields.CODEC] == codecs.BLOSC and not array[fields.DELTA]
    return min(lowest, highest) if is_random else 0, min(whole, highest)


@compiled("UniTuple(int64, 2)(int64, CPointer(int64))", inner=True)
def _own_segments(segments_at: int, chunk: Ints) -> tuple[int, int]:
    """Return the address of a chunk's first segment, and the number of its segments."""
    first = chunk[fields.FIRST_SEGMENT]
    return segments_at + first * 8 * fields.N_SEGMENT_COLUMNS, chunk[fields.END_SEGMENT] - first


@compiled("int64[::1](int64[:,::1], int64[:,::1], int64[:,::1])")
def head_sizes(arrays: Ints, chunks: Ints, segments: Ints) -> Any:
    """Return how many bytes of each chunk have to be decompressed, shape (n_chunks,)."""
    sizes = np.empty(len(chunks), np.int64)
    for c in range(len(chunks)):
        chunk = _chunk(address_of(chunks), c)
        array = row_of(address_of(arrays), chunk[fields.ARRAY], fields.N_ARRAY_COLUMNS)
        own, n_own = _own_segments(address_of(segments), chunk)
        first, stop = _wanted_bytes(array, chunk, own, n_own)
        sizes[c] = stop - first
    return sizes


@compiled("boolean(CPointer(int64), int64, int64, int64, int64)", inner=True)
def _take_zeros(array: Ints, segments_at: int, n_segments: int, buffer: int, is_lost: int) -> bool:
    """Write zeros in place of a chunk that does not exist; the buffer has room for a whole one.

    Returns
    -------
    False if the chunk is lost, and elements may be others than zeros that were never written.
    """
    longest = 0
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        longest = max(longest, segment[fields.COUNT])
    # No row has more than one element of column 0.
    may_be_zeros = array[fields.LOST_IS_ZERO] or (array[fields.INDEX_LIMIT] >= 0 and longest <= 1)
    if is_lost and not may_be_zeros:
        return False
    clear_bytes(buffer, array[fields.DECODED_BYTES])
    return True


@compiled(
    f"int64({_int64_2d}, {_int64_2d}, {_int64_2d}, int64[::1], int64[::1], "
    "uint8[::1], uint8[::1], uint8[::1], uint8[::1])"
)
def decode(  # noqa: PLR0912 - one loop over chunks
    arrays: Ints,
    chunks: Ints,
    segments: Ints,
    functions: Ints,
    report: Ints,
    raw_buffer: _Bytes,
    decoded_buffer: _Bytes,
    unshuffled_buffer: _Bytes,
    scratch_buffer: _Bytes,
) -> int:
    """Read, decompress and place chunks until none is left; several threads share one report.

    Parameters
    ----------
    arrays, chunks, segments
        The tables; ``chunks`` contains only the chunks to decode now. ``arrays`` have the addresses
        of their functions, see `resolve`.
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
    n_chunks, chunks_at = len(chunks), address_of(chunks)
    arrays_at, segments_at = address_of(arrays), address_of(segments)
    raw, decoded = address_of(raw_buffer), address_of(decoded_buffer)
    unshuffled, scratch = address_of(unshuffled_buffer), address_of(scratch_buffer)
    reported, of_functions = address_of(report), address_of(functions)
    report, functions = pointer_to(report), pointer_to(functions)
    zlib = call(functions[codecs.DEFLATE_NEW], ()) if functions[codecs.DEFLATE_NEW] else 0
    zstd = call(functions[codecs.ZSTD_NEW], ()) if functions[codecs.ZSTD_NEW] else 0
    clock = functions[codecs.CLOCK]
    n_read = n_decompressed = reading = decompressing = placing = 0
    now = nanoseconds(clock)
    while report[fields.FAILURE] == 0:
        first = atomic_add(reported + fields.NEXT_TASK * 8, fields.CHUNKS_OF_A_TASK)
        if first >= n_chunks:
            break
        stop = min(first + fields.CHUNKS_OF_A_TASK, n_chunks)
        begin = end = first  # chunks whose bytes have been read
        for c in range(first, stop):
            failure = 0
            chunk = _chunk(chunks_at, c)
            array = row_of(arrays_at, chunk[fields.ARRAY], fields.N_ARRAY_COLUMNS)
            size = array[fields.DECODED_BYTES]
            if c >= end:
                begin = c
                failure, end, n = _read_ahead(chunks_at, c, stop, raw, size, functions)
                n_read += n
                before, now = now, nanoseconds(clock)
                reading += now - before
            here = chunk[fields.OFFSET]
            if not chunk[fields.FLAGS] & fields.IN_MEMORY:
                here += raw - _chunk(chunks_at, begin)[fields.OFFSET]
            own, n_own = _own_segments(segments_at, chunk)
            is_lost = failure == fields.MISSING or chunk[fields.FLAGS] & fields.LOST != 0
            if is_lost or (failure == 0 and chunk[fields.FLAGS] & fields.ABSENT):
                failure = 0 if _take_zeros(array, own, n_own, decoded, is_lost) else fields.MISSING
                here = decoded
            elif failure == 0:
                is_filtered = array[fields.SHUFFLED] or array[fields.DELTA]
                is_checksummed = array[fields.CHECKSUMMED]
                stored = chunk[fields.SIZE]
                if is_checksummed:
                    stored -= fields.CHECKSUM_BYTES
                    if stored < 0 or not _is_checked(array, chunk):
                        failure = _verify(here, stored, functions)
                if failure:
                    pass
                elif _is_compressed(array, chunk):
                    wanted, until = _wanted_bytes(array, chunk, own, n_own)
                    n = call(
                        array[fields.DECOMPRESS],
                        (
                            here, stored, decoded, size, wanted, until,
                            of_functions, zlib, zstd, unshuffled,
                        ),
                    )  # fmt: skip
                    if n < 0:
                        failure, n = -n, size
                    elif n == size:
                        _mark_checked(array, chunk)
                    n_decompressed += n
                    here = decoded
                # Of chunks that are stored as they are, only the wanted part was read.
                elif array[fields.CODEC] != codecs.STORED or is_filtered or is_checksummed:
                    failure = 0 if stored == size else fields.WRONG_SIZE
                    if failure == 0:
                        _mark_checked(array, chunk)
                if is_filtered and failure == 0:
                    if array[fields.SHUFFLED] and not chunk[fields.FLAGS] & fields.UNSHUFFLED:
                        call(
                            array[fields.UNSHUFFLE],
                            (here, size, unshuffled, array[fields.ITEMSIZE]),
                        )
                        here = unshuffled
                    if array[fields.DELTA]:
                        call(array[fields.ADD_UP], (here, decoded, own, n_own, address_of(array)))
                        here = decoded
            before, now = now, nanoseconds(clock)
            decompressing += now - before
            if failure == 0 and not array[fields.NOT_PLACED]:
                arguments = (here, own, n_own, address_of(array), reported, scratch)
                failure = call(array[fields.PLACE], arguments)
                before, now = now, nanoseconds(clock)
                placing += now - before
            if failure:
                report[fields.FAILURE] = c * fields.PER_CHUNK + failure
                break
    finish_streams()
    atomic_add(reported + fields.DECOMPRESSED * 8, n_decompressed)
    atomic_add(reported + fields.READING * 8, reading)
    atomic_add(reported + fields.DECOMPRESSING * 8, decompressing)
    atomic_add(reported + fields.PLACING_ELEMENTS * 8, placing)
    if zlib:
        call(functions[codecs.DEFLATE_FREE], (zlib,))
    if zstd:
        call(functions[codecs.ZSTD_FREE], (zstd,))
    return n_read
