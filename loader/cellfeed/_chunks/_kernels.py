"""Compiled loops, which run without the GIL: read and decode chunks, place what they hold.

Every kernel has its signature written out, so that it is compiled (or loaded from disk) when
this module is imported, and never later beside threads or before a fork.

Tables are int64 arrays of one row for each item; the names of their columns are the constants
below.
"""

import errno
import os
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._chunks._native import (
    BLOCK_BYTES,
    C_FUNCTIONS,
    atomic_add,
    call,
    copy_bytes,
    pointer,
    stream_blocks,
)
from cellfeed._compiled import compiled

__all__ = [
    "ASCENDING",
    "BLOSC",
    "GZIP",
    "LZ4",
    "LZF",
    "STORED",
    "ZLIB",
    "ZSTD",
    "advise",
    "copy_all",
    "crossings_ascend",
    "decode",
    "densify",
    "place",
]

# Codecs.
STORED, ZLIB, ZSTD, BLOSC, LZF, GZIP, LZ4 = range(7)

# Columns of a table of arrays.
(
    CODEC,
    SHUFFLED,
    ITEMSIZE,
    OUT_ITEMSIZE,
    DECODED_BYTES,
    CAST,
    INDEX_LIMIT,
    LOST_IS_ZERO,  # whether chunks that are not there are taken to be zero
    STREAMED,  # whether elements go past the cache, since there are more than it holds
    N_ARRAY_COLUMNS,
) = range(10)

# Columns of a table of chunks. FD: a descriptor, or minus the address of a path, of a file that
# is opened to read the chunk. FLAGS: what was left out when this chunk was written. Its
# segments end where those of the next chunk begin.
FD, OFFSET, SIZE, FLAGS, ARRAY, FIRST_SEGMENT, N_CHUNK_COLUMNS = range(7)
UNCOMPRESSED, UNSHUFFLED, ABSENT = 1, 2, 4  # ABSENT: there is no such chunk; its elements are 0
WHOLE_FILE, LOST = 8, 16  # the chunk is all of its file, of at most SIZE bytes; it is not there
OWN_FILE = 32  # the file has to be as large as a chunk that is not compressed

# Columns of a table of segments: elements of a chunk that go to one destination.
FROM, COUNT, TO, N_SEGMENT_COLUMNS = range(4)

# What `decode` reports: a failure (0 if none), the chunk where it was, and whether the columns of
# each row ascend as far as they lie in one chunk.
FAILURE, FAILED_CHUNK, NEXT_TASK, ASCENDING, N_REPORTS = range(5)
UNREADABLE, TRUNCATED, UNDECODABLE, WRONG_SIZE, BAD_INDEX, MISSING, STOPPED, TOO_LARGE = range(1, 9)
UNSORTED, OUT_OF_BOUNDS = range(1, 3)

(
    _PREAD,
    _FADVISE,
    _ZLIB_NEW,
    _ZLIB_FREE,
    _ZLIB,
    _ZSTD_NEW,
    _ZSTD_FREE,
    _ZSTD,
    _BLOSC,
    _BLOSC_CHECK,
    _GZIP,
    _LZ4,
    _OPEN,
    _CLOSE,
    _SEEK,
    _ERRNO,
) = range(len(C_FUNCTIONS))
_WILL_NEED = 3
_FROM_END = 2
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_NO_SUCH_FILE = errno.ENOENT
_LZ4_HEADER = 4  # bytes: numcodecs puts the size there
LARGEST_READ = 1 << 20
_LARGEST_GAP = 1 << 14  # bytes read in vain cost less than another system call
_CHUNKS_OF_A_TASK = 8
_MOST_TRIES = 3
_LEAST_STREAMED = 1 << 10  # bytes; the ends of what is streamed are not
_TILE_ELEMENTS = 1 << 12  # of a dense matrix; they fit in the first cache

_int64_2d = "int64[:,::1]"


@compiled(f"Tuple((int64, int64))({_int64_2d}, int64, int64)")
def _extent(chunks: NDArray[np.int64], first: int, stop: int) -> Any:
    """Return up to which chunk one read goes, and how many bytes that takes."""
    begin = chunks[first, OFFSET]
    end = begin + chunks[first, SIZE]
    last = first + 1
    if end == begin:  # there is no such chunk
        return last, 0
    while last < stop:
        offset = chunks[last, OFFSET]
        near = end <= offset <= end + _LARGEST_GAP and chunks[last, FD] == chunks[first, FD]
        if not near or offset + chunks[last, SIZE] - begin > LARGEST_READ:
            break
        end = offset + chunks[last, SIZE]
        last += 1
    return last, end - begin


@compiled(f"void({_int64_2d}, int64[::1])")
def advise(chunks: NDArray[np.int64], functions: NDArray[np.int64]) -> None:
    """Tell the system which bytes will be read, so that it fetches them side by side."""
    if functions[_FADVISE] == 0:
        return
    i = 0
    while i < len(chunks) - 1:
        last, size = _extent(chunks, i, len(chunks) - 1)
        if size and chunks[i, FD] >= 0:
            call(functions[_FADVISE], (chunks[i, FD], chunks[i, OFFSET], size, _WILL_NEED))
        i = last


@compiled("Tuple((int64, int64))(int64, int64, int64, int64, int64[::1])")
def _read(fd: int, target: int, size: int, offset: int, functions: NDArray[np.int64]) -> Any:
    """Read up to the end of the file, or ``size`` bytes; return a failure, and the bytes read."""
    done = interrupted = 0
    while done < size:
        n = call(functions[_PREAD], (fd, target + done, size - done, offset + done))
        if n == 0:
            return TRUNCATED, done
        if n < 0:
            # An interrupted call looks like any other failure from here, so it is tried again.
            interrupted += 1
            if interrupted > _MOST_TRIES:
                return UNREADABLE, done
            continue
        done += n
    return 0, done


@compiled("Tuple((int64, int64))(int64, int64, int64[::1])")
def _open(path: int, flags: int, functions: NDArray[np.int64]) -> Any:
    """Open the file whose path is at this address; return a failure, and the descriptor."""
    fd = np.int64(np.int32(call(functions[_OPEN], (path, flags))))
    if fd >= 0:
        return 0, fd
    number = carray(pointer(call(functions[_ERRNO], ())), (1,), np.int32)[0]
    return (MISSING if number == _NO_SUCH_FILE else UNREADABLE), fd


@compiled("Tuple((int64, int64))(int64[::1], int64, int64, int64, int64[::1])")
def _read_from(
    chunk: NDArray[np.int64], target: int, size: int, expected: int, functions: NDArray[np.int64]
) -> Any:
    """Read bytes from where a chunk begins; return a failure, and the bytes read."""
    if size == 0:
        return 0, 0
    fd = chunk[FD]
    if fd < 0:
        failure, fd = _open(-fd, _OPEN_FLAGS, functions)
        if failure:
            return failure, 0
    failure, n = _read(fd, target, size, chunk[OFFSET], functions)
    if failure == 0 and chunk[FLAGS] & OWN_FILE:
        is_right = call(functions[_SEEK], (fd, 0, _FROM_END)) == expected
        failure = 0 if is_right else WRONG_SIZE
    if chunk[FD] < 0:
        call(functions[_CLOSE], (fd,))
    if chunk[FLAGS] & WHOLE_FILE:
        chunk[SIZE] = n
        failure = 0 if failure == TRUNCATED else failure
    return failure, n


@compiled(f"Tuple((int64, int64, int64))({_int64_2d}, int64, int64, int64, int64, int64[::1])")
def _read_ahead(
    chunks: NDArray[np.int64],
    first: int,
    stop: int,
    target: int,
    expected: int,
    functions: NDArray[np.int64],
) -> Any:
    """Read a chunk and those that lie beside it; return a failure, where they end, and bytes."""
    end, size = _extent(chunks, first, stop)
    failure, n = _read_from(chunks[first], target, size, expected, functions)
    if failure and end > first + 1:  # find out which chunk it is
        end = first + 1
        failure, n = _read_from(chunks[first], target, chunks[first, SIZE], expected, functions)
    return failure, end, n


@compiled("int64(int64, int64, int64, int64)")
def _lzf(source: int, size: int, target: int, capacity: int) -> int:
    """Decompress LZF (liblzf's format, as h5py writes it); the bytes written, -1 if damaged."""
    ins = carray(pointer(source), (size,), np.uint8)
    out = carray(pointer(target), (capacity,), np.uint8)
    i = o = np.int64(0)
    while i < size:
        control = np.int64(ins[i])
        i += 1
        if control < 32:
            n = control + 1
            if i + n > size or o + n > capacity:
                return -1
            for j in range(n):
                out[o + j] = ins[i + j]
            i += n
            o += n
            continue
        n = control >> 5
        if n == 7:
            if i >= size:
                return -1
            n += np.int64(ins[i])
            i += 1
        if i >= size:
            return -1
        start = o - ((control & 31) << 8) - np.int64(ins[i]) - 1
        i += 1
        n += 2
        if start < 0 or o + n > capacity:
            return -1
        for j in range(n):  # byte by byte, since what is copied may overlap where it goes
            out[o + j] = out[start + j]
        o += n
    return int(o)


@compiled("int64(int64, int64, int64, int64, int64[::1])")
def _lz4(source: int, size: int, target: int, capacity: int, functions: NDArray[np.int64]) -> Any:
    """Decompress LZ4 as numcodecs writes it; the bytes written, below 0 if damaged."""
    if size <= _LZ4_HEADER:
        return -1
    begin, n_compressed = source + _LZ4_HEADER, size - _LZ4_HEADER
    return np.int32(call(functions[_LZ4], (begin, target, n_compressed, capacity)))


@compiled("void(int64, int64, int64, int64)")
def _unshuffle(source: int, size: int, target: int, itemsize: int) -> None:
    """Put together what HDF5's shuffle filter took apart: first all first bytes, and so on."""
    n = size // itemsize
    ins = carray(pointer(source), (size,), np.uint8)
    if itemsize == 4:
        out4 = carray(pointer(target), (n,), np.uint32)
        for i in range(n):
            out4[i] = (
                np.uint32(ins[i])
                | np.uint32(ins[n + i]) << np.uint32(8)
                | np.uint32(ins[2 * n + i]) << np.uint32(16)
                | np.uint32(ins[3 * n + i]) << np.uint32(24)
            )
    else:
        out = carray(pointer(target), (size,), np.uint8)
        for i in range(n):
            for byte in range(itemsize):
                out[i * itemsize + byte] = ins[byte * n + i]
    if size % itemsize:
        copy_bytes(target + n * itemsize, source + n * itemsize, size % itemsize)


@compiled("boolean(int64[::1], int64[::1])")
def _is_compressed(array: NDArray[np.int64], chunk: NDArray[np.int64]) -> bool:
    return array[CODEC] != STORED and not chunk[FLAGS] & UNCOMPRESSED


@compiled("int64(int64[::1], int64[::1], int64, int64, int64[::1], int64, int64)")
def _decompress(
    array: NDArray[np.int64],
    chunk: NDArray[np.int64],
    source: int,
    target: int,
    functions: NDArray[np.int64],
    zlib: int,
    zstd: int,
) -> int:
    """Decompress a chunk, if it is, which has to come out at exactly its size; 0, or a failure."""
    size, expected = chunk[SIZE], array[DECODED_BYTES]
    if not _is_compressed(array, chunk):
        # Chunks stored as they are were cut to what is wanted of them, unless shuffled.
        whole = array[CODEC] != STORED or array[SHUFFLED]
        return WRONG_SIZE if whole and size != expected else 0
    if array[CODEC] in (ZLIB, GZIP):
        # Without a place for the size, libdeflate fails unless the output is full.
        function = functions[_ZLIB] if array[CODEC] == ZLIB else functions[_GZIP]
        result = np.int32(call(function, (zlib, source, size, target, expected, 0)))
        if result == 0:
            return 0
        return UNDECODABLE if result == 1 else WRONG_SIZE
    if array[CODEC] == ZSTD:
        n = call(functions[_ZSTD], (zstd, target, expected, source, size))
        if 0 <= n <= expected:
            return 0 if n == expected else WRONG_SIZE
        return UNDECODABLE
    if array[CODEC] == BLOSC:
        stated = np.zeros(1, np.int64)
        place_of_stated = stated.ctypes.data
        if np.int32(call(functions[_BLOSC_CHECK], (source, size, place_of_stated))) != 0:
            return UNDECODABLE
        if stated[0] != expected:
            return WRONG_SIZE
        n = np.int64(np.int32(call(functions[_BLOSC], (source, target, expected, 1))))
        return 0 if n == expected else UNDECODABLE
    if array[CODEC] == LZ4:
        n = _lz4(source, size, target, expected, functions)
    else:
        n = _lzf(source, size, target, expected)
    if n < 0:
        return UNDECODABLE
    return 0 if n == expected else WRONG_SIZE


@compiled("int64(int64, int64, int64, int64)")
def _check_indices(address: int, n: int, itemsize: int, limit: int) -> int:
    """Return 0 if indices ascend strictly within [0, limit), else what is wrong with them."""
    if n == 0:
        return 0
    descents = 0
    if itemsize == 4:
        narrow = carray(pointer(address), (n,), np.int32)
        lowest = highest = narrow[0]
        for i in range(1, n):
            descents += narrow[i] <= narrow[i - 1]
            lowest = min(lowest, narrow[i])
            highest = max(highest, narrow[i])
        outside = lowest < 0 or highest >= limit
    else:
        wide = carray(pointer(address), (n,), np.int64)
        least = most = wide[0]
        for i in range(1, n):
            descents += wide[i] <= wide[i - 1]
            least = min(least, wide[i])
            most = max(most, wide[i])
        outside = least < 0 or most >= limit
    if outside:
        return OUT_OF_BOUNDS
    return UNSORTED if descents else 0


@compiled("void(int64, int64, int64)")
def _stream_bytes(target: int, source: int, n: int) -> None:
    """Copy bytes past the cache."""
    if n < _LEAST_STREAMED:
        copy_bytes(target, source, n)
        return
    head = -target % BLOCK_BYTES
    n_blocks = (n - head) // BLOCK_BYTES
    tail = head + n_blocks * BLOCK_BYTES
    copy_bytes(target, source, head)
    stream_blocks(target + head, source + head, n_blocks)
    copy_bytes(target + tail, source + tail, n - tail)


@compiled("int64(int64, int64[:,::1], int64[::1], int64[::1])")
def _place_segments(
    source: int,
    segments: NDArray[np.int64],
    array: NDArray[np.int64],
    report: NDArray[np.int64],
) -> int:
    for k in range(len(segments)):
        begin = source + segments[k, FROM] * array[ITEMSIZE]
        n, target = segments[k, COUNT], segments[k, TO]
        if array[CAST]:
            call(array[CAST], (begin, target, n))
            begin = target
        if array[INDEX_LIMIT] >= 0:
            verdict = _check_indices(begin, n, array[OUT_ITEMSIZE], array[INDEX_LIMIT])
            if verdict == OUT_OF_BOUNDS:
                return BAD_INDEX
            if verdict == UNSORTED:
                report[ASCENDING] = 0
        if array[CAST]:
            continue
        if array[STREAMED]:
            _stream_bytes(target, begin, n * array[ITEMSIZE])
        else:
            copy_bytes(target, begin, n * array[ITEMSIZE])
    return 0


@compiled("boolean(int64[::1], int64[:,::1])")
def _may_be_lost(array: NDArray[np.int64], segments: NDArray[np.int64]) -> bool:
    """Return whether these elements may be zero, and for that reason were never written."""
    if array[LOST_IS_ZERO]:
        return True
    # No row has more than one element of column 0.
    return bool(array[INDEX_LIMIT] >= 0 and np.all(segments[:, COUNT] <= 1))


@compiled("void(int64[:,::1], int64, uint8[::1])")
def _take_zeros(segments: NDArray[np.int64], itemsize: int, buffer: NDArray[np.uint8]) -> None:
    """Let all segments begin at zeros, no more of which are made than the longest takes."""
    longest = 0
    for k in range(len(segments)):
        segments[k, FROM] = 0
        longest = max(longest, segments[k, COUNT])
    buffer[: longest * itemsize] = 0


@compiled(
    f"int64({_int64_2d}, {_int64_2d}, {_int64_2d}, int64[::1], int64[::1], "
    "uint8[::1], uint8[::1], uint8[::1])"
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
) -> int:
    """Read, decompress and place chunks until none is left; many threads share one report.

    Parameters
    ----------
    arrays, chunks, segments
        The tables; a last row of ``chunks`` says where the segments end.
    functions
        Addresses of the C functions.
    report
        Shared by all threads that work on these tables.
    raw_buffer, decoded_buffer, unshuffled_buffer
        What one read brings, a chunk decompressed, and a chunk unshuffled; of this thread
        alone. (They are arguments since a compiled function frees its own
        arrays after their last use by name, whoever still has their address.)

    Returns
    -------
    The bytes that this thread read.
    """
    n_chunks = len(chunks) - 1
    raw, decoded, unshuffled = (
        raw_buffer.ctypes.data,
        decoded_buffer.ctypes.data,
        unshuffled_buffer.ctypes.data,
    )
    zlib = call(functions[_ZLIB_NEW], ()) if functions[_ZLIB_NEW] else 0
    zstd = call(functions[_ZSTD_NEW], ()) if functions[_ZSTD_NEW] else 0
    n_read = 0
    while report[FAILURE] == 0:
        first = atomic_add(report.ctypes.data + NEXT_TASK * 8, _CHUNKS_OF_A_TASK)
        if first >= n_chunks:
            break
        stop = min(first + _CHUNKS_OF_A_TASK, n_chunks)
        begin = end = first  # chunks whose bytes are at hand
        for c in range(first, stop):
            failure = 0
            array = arrays[chunks[c, ARRAY]]
            if c >= end:
                begin = c
                expected = array[DECODED_BYTES]
                failure, end, n = _read_ahead(chunks, c, stop, raw, expected, functions)
                n_read += n
            here = raw + chunks[c, OFFSET] - chunks[begin, OFFSET]
            first_segment, last_segment = chunks[c, FIRST_SEGMENT], chunks[c + 1, FIRST_SEGMENT]
            absent = failure == 0 and chunks[c, FLAGS] & ABSENT
            if failure == MISSING or chunks[c, FLAGS] & LOST:
                absent = _may_be_lost(array, segments[first_segment:last_segment])
                failure = 0 if absent else MISSING
            if absent:
                _take_zeros(segments[first_segment:last_segment], array[ITEMSIZE], decoded_buffer)
                here = decoded
            elif failure == 0:
                failure = _decompress(array, chunks[c], here, decoded, functions, zlib, zstd)
                here = decoded if _is_compressed(array, chunks[c]) else here
                if failure == 0 and array[SHUFFLED] and not chunks[c, FLAGS] & UNSHUFFLED:
                    _unshuffle(here, array[DECODED_BYTES], unshuffled, array[ITEMSIZE])
                    here = unshuffled
            if failure == 0:
                failure = _place_segments(here, segments[first_segment:last_segment], array, report)
            if failure:
                report[FAILED_CHUNK] = c
                report[FAILURE] = failure
                break
    if zlib:
        call(functions[_ZLIB_FREE], (zlib,))
    if zstd:
        call(functions[_ZSTD_FREE], (zstd,))
    return n_read


@compiled("void(int64, int64[:,::1], int64[::1], int64[::1])")
def place(
    source: int,
    segments: NDArray[np.int64],
    array: NDArray[np.int64],
    report: NDArray[np.int64],
) -> None:
    """Place elements that are in memory already, as `decode` does with those of a chunk."""
    report[FAILURE] = _place_segments(source, segments, array, report)


@compiled("boolean(int64[::1], int64)")
def crossings_ascend(crossings: NDArray[np.int64], itemsize: int) -> bool:
    """Return whether the index at each address is above the one before it in memory."""
    for i in range(crossings.size):
        if itemsize == 4:
            narrow = carray(pointer(crossings[i] - 4), (2,), np.int32)
            if narrow[1] <= narrow[0]:
                return False
        else:
            wide = carray(pointer(crossings[i] - 8), (2,), np.int64)
            if wide[1] <= wide[0]:
                return False
    return True


@compiled(
    *(
        f"void({index}[::1], {index}[::1], {value}[::1], {value}[:,::1])"
        for index in ("int32", "int64")
        for value in ("uint8", "uint16", "uint32", "uint64")
    )
)
def densify(
    pointers: NDArray[Any], indices: NDArray[Any], data: NDArray[Any], dense: NDArray[Any]
) -> None:
    """Fill ``dense`` from CSR rows of ascending columns; values are bits, whatever they mean.

    It is made piece by piece in the first cache, from which it goes to memory in whole lines.
    """
    n_vars, n_elements = dense.shape[1], dense.size
    tile = np.empty(_TILE_ELEMENTS, dense.dtype)
    row, k = 0, pointers[0]
    for first in range(0, n_elements, _TILE_ELEMENTS):
        n = min(_TILE_ELEMENTS, n_elements - first)
        tile[:n] = 0
        while row < len(dense):
            start, stop = row * n_vars - first, pointers[row + 1]
            while k < stop and start + indices[k] < n:
                tile[start + indices[k]] = data[k]
                k += 1
            if start + n_vars > n:
                break
            row += 1
        begin = dense.ctypes.data + first * dense.itemsize
        _stream_bytes(begin, tile.ctypes.data, n * dense.itemsize)


@compiled("void(int64[::1], int64[::1], int64[::1])")
def copy_all(
    sources: NDArray[np.int64], targets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> None:
    """Copy pieces of memory, given by address and bytes."""
    for i in range(sizes.size):
        copy_bytes(targets[i], sources[i], sizes[i])
