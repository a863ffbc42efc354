"""Compiled: decompressing chunks, each codec a function by itself; `_codecs` describes them.

If only the head of a chunk is wanted, and its codec allows it, only that is decompressed. Deflate,
LZ4 and LZF write sequentially, so a short buffer receives the head of a chunk; Zstandard and Blosc
with LZ4 consist of blocks. This skips checks that need the end of a chunk: its checksum, and its
size.
"""

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.decode._kernels import _codecs as codecs
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import (
    LANES,
    add_up_lanes,
    address_of,
    call,
    copy_bytes,
    elements,
    load_word,
    row_of,
    stack,
    store_word,
)
from cellfeed.decode._kernels._placing import extent

# Every codec's function takes ten integers: the address of the chunk and its size; the address of
# the output and the chunk's size after decompression; the first byte that is wanted and the one
# after the last; and addresses of `function_addresses`, of the decompressors of deflate and of
# Zstandard, and of scratch memory of the size of the output. It returns how many bytes it has
# decompressed, including those that are wanted, or minus a failure. A chunk whose wanted bytes are
# damaged is decompressed to its end, which shows the damage.
_SIGNATURE = f"int64({', '.join(['int64'] * 10)})"

# libdeflate stops at a match (of at most 258 bytes) that does not fit into the buffer, so all
# bytes before it are right; up to 39 wrong bytes may follow them. If a stored block of up to 64 KiB
# does not fit, nothing of it is written: then the mark is still there.
_MARK_AT, _HEAD_MARGIN = 64, 384
_MARK = np.uint64(0x9E3779B97F4A7C15)
_INSUFFICIENT_SPACE = 3

# LZF writes nothing of a piece, of at most 264 bytes, that does not fit, and all before it.
_TOO_LONG = errno.E2BIG

_LZ4_HEADER = 4  # of numcodecs' header, which contains the size
_LZ4_HEAD = 4  # stopping early takes up to three times as long per byte
_ZSTD_BLOCK = 1 << 17
_ZSTD_ERRORS = -256  # results from here to -1 are errors
_BLOSC_FLAGS, _BLOSC_TYPESIZE, _BLOSC_BLOCK_SIZE, _BLOSC_HEADER = 2, 3, 8, 16  # its size
_BLOSC_SHUFFLED, _BLOSC_AS_IT_IS, _BLOSC_BITS, _BLOSC_UNSPLIT, _BLOSC_FORMAT = 1, 2, 4, 16, 5
_BLOSC_LZ4 = 1  # the format of LZ4 and LZ4HC
_BLOSC_LEAST_SPLIT = 128  # elements of a block; the bytes of smaller ones are compressed together

_decompressors = dict[int, Any]()


def decompressor(codec: int) -> int:
    """Return the address of a codec's function; 0 if chunks are not compressed."""
    return 0 if codec == codecs.STORED else int(_decompressors[codec].address)


def _decompresses(codec: int) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        _decompressors[codec] = compiled(_SIGNATURE, callback=True)(function)
        return _decompressors[codec]

    return decorate


def _inflates(codec: int, function: int) -> None:
    """Define the function of a codec that libdeflate decompresses."""

    @_decompresses(codec)
    def inflate(source, size, target, expected, first, wanted, functions, zlib, zstd, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
        decompress = elements(functions, np.int64)[function]
        n = wanted + _HEAD_MARGIN
        if n < expected:
            mark = elements(target + wanted + _MARK_AT, np.uint64)
            mark[0] = _MARK
            result = np.int32(call(decompress, (zlib, source, size, target, n, 0)))
            if result == _INSUFFICIENT_SPACE and mark[0] != _MARK:
                return n
        # Without an address for the size, libdeflate fails unless the output is full.
        result = np.int32(call(decompress, (zlib, source, size, target, expected, 0)))
        if result == 0:
            return expected
        return -fields.UNDECODABLE if result == 1 else -fields.WRONG_SIZE


_inflates(codecs.ZLIB, codecs.ZLIB_DECOMPRESS)
_inflates(codecs.GZIP, codecs.GZIP_DECOMPRESS)


_of_output, _of_input, _one_size, _four_addresses = stack(3), stack(3), stack(1), stack(4)
_ADDRESS, _SIZE, _POSITION = range(3)  # of a buffer of Zstandard


@compiled("int64(int64, int64, int64, int64, int64, CPointer(int64), int64)", inner=True)
def _zstd_head(
    source: int, size: int, target: int, expected: int, wanted: int, functions: Ints, zstd: int
) -> int:
    """Decompress whole blocks; return the bytes decompressed, 0 if that fails."""
    n = -(-wanted // _ZSTD_BLOCK) * _ZSTD_BLOCK
    if n >= expected or not functions[codecs.ZSTD_STREAM]:
        return 0
    call(functions[codecs.ZSTD_START_STREAM], (zstd,))
    out, ins = _of_output(), _of_input()
    out[_ADDRESS], out[_SIZE], out[_POSITION] = target, wanted, 0
    ins[_ADDRESS], ins[_SIZE], ins[_POSITION] = source, size, 0
    out_address, in_address = address_of(out), address_of(ins)
    while out[_POSITION] < wanted:
        before = out[_POSITION] + ins[_POSITION]
        result = call(functions[codecs.ZSTD_STREAM], (zstd, out_address, in_address))
        if _ZSTD_ERRORS <= result <= 0 or out[_POSITION] + ins[_POSITION] == before:
            break
    return n if out[_POSITION] == wanted else 0


@_decompresses(codecs.ZSTD)
def _zstd(source, size, target, expected, first, wanted, functions, zlib, zstd, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    table = elements(functions, np.int64)
    if wanted < expected:
        n = _zstd_head(source, size, target, expected, wanted, table, zstd)
        if n:
            return n
    n = call(table[codecs.ZSTD_DECOMPRESS], (zstd, target, expected, source, size))
    if 0 <= n <= expected:
        return expected if n == expected else -fields.WRONG_SIZE
    return -fields.UNDECODABLE


@compiled("int64(int64, int64, int64, int64, int64, CPointer(int64))", inner=True)
def _lz4_block(
    source: int, size: int, target: int, expected: int, wanted: int, functions: Ints
) -> int:
    if wanted < expected // _LZ4_HEAD and functions[codecs.LZ4_DECOMPRESS_HEAD]:
        arguments = (source, target, size, wanted, expected)
        n = np.int64(np.int32(call(functions[codecs.LZ4_DECOMPRESS_HEAD], arguments)))
        if n >= wanted:
            return int(n)
    n = np.int64(np.int32(call(functions[codecs.LZ4_DECOMPRESS], (source, target, size, expected))))
    if n < 0:
        return -fields.UNDECODABLE
    return expected if n == expected else -fields.WRONG_SIZE


@compiled("int64(int64)", inner=True)
def _byte_at(address: int) -> int:
    return int(elements(address, np.uint8)[0])


@compiled("int64(int64)", inner=True)
def int32_at(address: int) -> int:
    """Return the little-endian int32 at an address, which need not be aligned."""
    number = _byte_at(address) | _byte_at(address + 1) << 8
    number |= _byte_at(address + 2) << 16 | _byte_at(address + 3) << 24
    return int(np.int32(number))


@compiled("void(CPointer(int64), int64, int64, int64, int64)", inner=True)
def _join_planes(planes: Ints, first: int, stop: int, target: int, itemsize: int) -> None:
    """Write elements ``[first, stop)`` of 2 or 4 bytes, whose bytes are in planes by position."""
    n = stop - first
    a = elements(planes[0] + first, np.uint8)
    b = elements(planes[1] + first, np.uint8)
    if itemsize == 2:
        out2 = elements(target + 2 * first, np.uint16)
        for i in range(n):
            out2[i] = np.uint16(a[i]) | np.uint16(b[i]) << np.uint16(8)
        return
    c = elements(planes[2] + first, np.uint8)
    d = elements(planes[3] + first, np.uint8)
    out4 = elements(target + 4 * first, np.uint32)
    for i in range(n):
        out4[i] = (
            np.uint32(a[i])
            | np.uint32(b[i]) << np.uint32(8)
            | np.uint32(c[i]) << np.uint32(16)
            | np.uint32(d[i]) << np.uint32(24)
        )


@compiled("int64(int64, int64, int64, int64, int64, int64, CPointer(int64), int64)", inner=True)
def _blosc_lz4(  # noqa: PLR0912 - one loop over blocks and their streams
    source: int,
    size: int,
    target: int,
    expected: int,
    first: int,
    stop: int,
    functions: Ints,
    work: int,
) -> int:
    """Decompress bytes ``[first, stop)`` of a valid chunk to their places in the output.

    Blosc's own functions decompress whole blocks, and allocate memory at each call.

    Parameters
    ----------
    source, size
        The chunk.
    target, expected
        The output, and its size.
    first, stop
        The bytes that are wanted.
    functions
        Addresses of the C functions.
    work
        Memory of the size of the output.

    Returns
    -------
    Number of bytes decompressed; 0 if another codec was used, or if the chunk is damaged.
    """
    flags = _byte_at(source + _BLOSC_FLAGS)
    itemsize = _byte_at(source + _BLOSC_TYPESIZE)
    block = int32_at(source + _BLOSC_BLOCK_SIZE)
    is_other = flags >> _BLOSC_FORMAT != _BLOSC_LZ4 or flags & (_BLOSC_AS_IT_IS | _BLOSC_BITS)
    if is_other or itemsize not in (1, 2, 4) or block <= 0:
        return 0
    n_blocks = -(-expected // block)
    if block % itemsize or expected % itemsize or _BLOSC_HEADER + 4 * n_blocks > size:
        return 0
    is_shuffled = flags & _BLOSC_SHUFFLED and itemsize > 1
    planes = _four_addresses()
    n_decompressed = np.int64(0)
    for k in range(first // block, -(-stop // block)):
        out, n = target + k * block, min(block, expected - k * block)
        begin = max(0, first - k * block) // itemsize
        end = -(-min(n, stop - k * block) // itemsize)
        is_split = not flags & _BLOSC_UNSPLIT and n == block
        is_split = is_split and block // itemsize >= _BLOSC_LEAST_SPLIT
        n_streams = itemsize if is_split else 1
        n_stream, at = n // n_streams, int32_at(source + _BLOSC_HEADER + 4 * k)
        for s in range(n_streams):
            if at < _BLOSC_HEADER or at > size - 4:
                return 0
            n_stored = int32_at(source + at)
            at += 4
            if n_stored < 0 or n_stored > size - at:
                return 0
            to = (work if is_shuffled else out) + s * n_stream
            if not is_shuffled:
                n_wanted = min(n_stream, max(0, end * itemsize - s * n_stream))
            else:
                n_wanted = end if is_split else n - n // itemsize + end
            planes[s] = to
            if n_stored == n_stream and is_shuffled:
                planes[s] = source + at
            elif n_stored == n_stream:
                copy_bytes(to, source + at, n_wanted)
            elif n_wanted > 0:
                stream = source + at, n_stored, to, n_stream, n_wanted
                if _lz4_block(*stream, functions) < n_wanted:
                    return 0
            n_decompressed += n_wanted
            at += n_stored
        if is_shuffled:
            if not is_split:
                for s in range(1, itemsize):
                    planes[s] = planes[0] + s * (n // itemsize)
            _join_planes(planes, begin, end, out, itemsize)
    return int(n_decompressed)


@_decompresses(codecs.BLOSC)
def _blosc(source, size, target, expected, first, wanted, functions, zlib, zstd, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    table = elements(functions, np.int64)
    stated = _one_size()
    stated[0] = 0
    address = address_of(stated)
    if np.int32(call(table[codecs.BLOSC_VALIDATE], (source, size, address))) != 0:
        return -fields.UNDECODABLE
    if stated[0] != expected:
        return -fields.WRONG_SIZE
    n = _blosc_lz4(source, size, target, expected, first, wanted, table, work)
    if n:
        return n
    n = np.int64(np.int32(call(table[codecs.BLOSC_DECOMPRESS], (source, target, expected, 1))))
    return expected if n == expected else -fields.UNDECODABLE


@_decompresses(codecs.LZ4)
def _lz4(source, size, target, expected, first, wanted, functions, zlib, zstd, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Decompress LZ4 as numcodecs writes it."""
    if size <= _LZ4_HEADER:
        return -fields.UNDECODABLE
    table = elements(functions, np.int64)
    return _lz4_block(source + _LZ4_HEADER, size - _LZ4_HEADER, target, expected, wanted, table)


@_decompresses(codecs.LZ4_RAW)
def _lz4_raw(source, size, target, expected, first, wanted, functions, zlib, zstd, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    table = elements(functions, np.int64)
    return _lz4_block(source, size, target, expected, wanted, table)


@_decompresses(codecs.LZF)
def _lzf(source, size, target, expected, first, wanted, functions, zlib, zstd, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Decompress LZF by h5py's function, which returns 0 with an error number if it fails."""
    table = elements(functions, np.int64)
    n = min(wanted + _HEAD_MARGIN, expected)
    while True:
        result = np.uint32(call(table[codecs.LZF_DECOMPRESS], (source, size, target, n)))
        number = elements(call(table[codecs.ERRNO], ()), np.int32)[0]
        is_longer = result == 0 and number == _TOO_LONG
        if n == expected:
            break
        if is_longer:
            return n
        n = expected
    if result == expected:
        return expected
    return -fields.WRONG_SIZE if result or is_longer else -fields.UNDECODABLE


@compiled("int64(int64, int64, int64, int64, int64)")
def snappy(  # noqa: PLR0912 - one for each tag
    source: int, size: int, target: int, expected: int, wanted: int
) -> int:
    """Decompress Snappy; return the bytes written, -1 if damaged, -2 if it is of another size.

    It stops once ``wanted`` bytes are written. Format:
    https://github.com/google/snappy/blob/main/format_description.txt
    """
    ins = elements(source, np.uint8)
    out = elements(target, np.uint8)
    n: Any
    i = o = stated = shift = np.int64(0)
    while True:
        if i >= size or shift > 28:
            return -1
        byte = np.int64(ins[i])
        i += 1
        stated |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if stated != expected:
        return -2
    while i < size and o < wanted:
        tag = np.int64(ins[i])
        i += 1
        if tag & 3 == 0:  # as it is
            n = (tag >> 2) + 1
            if n > 60:
                n_bytes = n - 60
                if i + n_bytes > size:
                    return -1
                n = np.int64(1)
                for k in range(n_bytes):
                    n += np.int64(ins[i + k]) << (8 * k)
                i += n_bytes
            if n > size - i or n > expected - o:
                return -1
            if n <= 16 and i + 16 <= size and o + 16 <= expected:
                store_word(target + o, load_word(source + i))
                store_word(target + o + 8, load_word(source + i + 8))
            else:
                copy_bytes(target + o, source + i, n)
            i += n
            o += n
            continue
        # Bytes that were written before.
        if tag & 3 == 1:
            if i >= size:
                return -1
            n, back = ((tag >> 2) & 7) + 4, (tag >> 5) << 8 | np.int64(ins[i])
            i += 1
        else:
            n, back, n_bytes = (tag >> 2) + 1, np.int64(0), 2 if tag & 3 == 2 else 4
            if i + n_bytes > size:
                return -1
            for k in range(n_bytes):
                back |= np.int64(ins[i + k]) << (8 * k)
            i += n_bytes
        if back == 0 or back > o or n > expected - o:
            return -1
        if back >= 8 and o + n + 8 <= expected:
            for k in range(0, n, 8):  # what exceeds them is overwritten
                store_word(target + o + k, load_word(target + o + k - back))
        else:
            for k in range(n):  # byte by byte, since source and target may overlap
                out[o + k] = out[o + k - back]
        o += n
    return int(o)


@_decompresses(codecs.SNAPPY)
def _snappy(source, size, target, expected, first, wanted, functions, zlib, zstd, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    if wanted < expected:
        n = snappy(source, size, target, expected, wanted)
        if n >= wanted:
            return n
    n = snappy(source, size, target, expected, expected + 1)
    if n == -1:
        return -fields.UNDECODABLE
    return expected if n == expected else -fields.WRONG_SIZE


@compiled("void(int64, int64, int64, int64)", callback=True)
def unshuffle(source, size, target, itemsize):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Undo HDF5's shuffle filter, which groups the bytes of elements by position."""
    n = size // itemsize
    ins = elements(source, np.uint8)
    if itemsize == 4:
        out4 = elements(target, np.uint32)
        for i in range(n):
            out4[i] = (
                np.uint32(ins[i])
                | np.uint32(ins[n + i]) << np.uint32(8)
                | np.uint32(ins[2 * n + i]) << np.uint32(16)
                | np.uint32(ins[3 * n + i]) << np.uint32(24)
            )
    elif itemsize == 8:
        out8 = elements(target, np.uint64)
        for i in range(n):
            element = np.uint64(ins[i])
            for byte in range(1, 8):
                element |= np.uint64(ins[byte * n + i]) << np.uint64(8 * byte)
            out8[i] = element
    else:
        out = elements(target, np.uint8)
        for i in range(n):
            for byte in range(itemsize):
                out[i * itemsize + byte] = ins[byte * n + i]
    if size % itemsize:
        copy_bytes(target + n * itemsize, source + n * itemsize, size % itemsize)


# Compiled: adding up elements that are stored as differences.

_word = "uint8", "uint32", "uint64"


@compiled(*(f"void(CPointer({word}), CPointer({word}), int64)" for word in _word), inner=True)
def _add_up(differences: NDArray[Any], sums: NDArray[Any], n: int) -> None:
    """Add up integers, which wrap around at the size of their dtype, signed or not."""
    total = np.uint64(0)
    for i in range(n):
        total += np.uint64(differences[i])
        sums[i] = total


@compiled("void(int64, int64, int64)", inner=True)
def _add_up_16_bits(source: int, target: int, n: int) -> None:
    """Add up 16-bit integers from one address to another; most indices have 16 bits."""
    total, whole = np.uint16(0), n - n % LANES
    for i in range(0, whole, LANES):
        total = add_up_lanes(target + 2 * i, source + 2 * i, total)
    differences = elements(source, np.uint16)
    sums = elements(target, np.uint16)
    for i in range(whole, n):
        total = np.uint16(total + differences[i])
        sums[i] = total


@compiled("void(int64, int64, int64, int64, int64)", callback=True)
def adder(source, target, segments_at, n_segments, array_at):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add up the differences of a chunk, as far as segments need its elements.

    All are addresses, of the chunk's elements, of the output, which may be the same, and of the
    tables of segments and arrays.
    """
    array = elements(array_at, np.int64)
    n, wanted = array[fields.DECODED_BYTES] // array[fields.ITEMSIZE], 0
    for k in range(n_segments):
        segment = row_of(segments_at, k, fields.N_SEGMENT_COLUMNS)
        _, stop = extent(segment, array[fields.PLACING])
        wanted = max(wanted, stop)
    n = min(n, wanted)
    if array[fields.ITEMSIZE] == 1:
        _add_up(elements(source, np.uint8), elements(target, np.uint8), n)
    elif array[fields.ITEMSIZE] == 2:
        _add_up_16_bits(source, target, n)
    elif array[fields.ITEMSIZE] == 4:
        _add_up(elements(source, np.uint32), elements(target, np.uint32), n)
    else:
        _add_up(elements(source, np.uint64), elements(target, np.uint64), n)
