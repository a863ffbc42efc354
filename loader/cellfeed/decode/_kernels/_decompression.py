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
    int32_at,
    row_of,
    stack,
)
from cellfeed.decode._kernels._placing import extent

# libdeflate stops at a match (of at most 258 bytes) that does not fit into the buffer, so all
# bytes before it are right; up to 39 wrong bytes may follow them. If a stored block of up to 64 KiB
# does not fit, nothing of it is written: then the mark is still there.
_MARK_AT, _HEAD_MARGIN = 64, 384
_MARK = np.uint64(0x9E3779B97F4A7C15)
_INSUFFICIENT_SPACE = 3

# LZF writes nothing of a piece, of at most 264 bytes, that does not fit, and all before it.
_TOO_LONG = errno.E2BIG

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
        _decompressors[codec] = compiled(codecs.SIGNATURE, callback=True)(function)
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


_of_output, _of_input, _one_size = stack(3), stack(3), stack(1)
_ADDRESS, _SIZE, _POSITION = range(3)  # of a buffer of Zstandard


@compiled("int64(int64, int64, int64, int64, int64, CPointer(int64), int64)", inner=True)
def _zstd_head(
    source: int, size: int, target: int, expected: int, wanted: int, functions: Ints, zstd: int
) -> int:
    """Decompress whole blocks; return the bytes decompressed, 0 if that fails."""
    n = -(-wanted // _ZSTD_BLOCK) * _ZSTD_BLOCK
    if n >= expected:
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
    if wanted < expected // _LZ4_HEAD:
        arguments = (source, target, size, wanted, expected)
        n = np.int64(np.int32(call(functions[codecs.LZ4_DECOMPRESS_HEAD], arguments)))
        if n >= wanted:
            return int(n)
    n = np.int64(np.int32(call(functions[codecs.LZ4_DECOMPRESS], (source, target, size, expected))))
    if n < 0:
        return -fields.UNDECODABLE
    return expected if n == expected else -fields.WRONG_SIZE


@compiled("void(int64, int64, int64, int64, int64, int64)", inner=True)
def _join_planes(planes: int, n: int, first: int, stop: int, target: int, itemsize: int) -> None:
    """Write elements ``[first, stop)`` of ``n``, whose bytes are grouped by their position."""
    ins = elements(planes, np.uint8)
    if itemsize == 2:
        out2 = elements(target, np.uint16)
        for i in range(first, stop):
            out2[i] = np.uint16(ins[i]) | np.uint16(ins[n + i]) << np.uint16(8)
    elif itemsize == 4:
        out4 = elements(target, np.uint32)
        for i in range(first, stop):
            out4[i] = (
                np.uint32(ins[i])
                | np.uint32(ins[n + i]) << np.uint32(8)
                | np.uint32(ins[2 * n + i]) << np.uint32(16)
                | np.uint32(ins[3 * n + i]) << np.uint32(24)
            )
    elif itemsize == 8:
        out8 = elements(target, np.uint64)
        for i in range(first, stop):
            element = np.uint64(ins[i])
            for byte in range(1, 8):
                element |= np.uint64(ins[byte * n + i]) << np.uint64(8 * byte)
            out8[i] = element
    else:
        out = elements(target, np.uint8)
        for i in range(first, stop):
            for byte in range(itemsize):
                out[i * itemsize + byte] = ins[byte * n + i]


@compiled("int64(int64, int64, int64, int64, int64, int64, CPointer(int64), int64)", inner=True)
def _blosc_lz4(
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
    header = elements(source, np.uint8)
    flags, itemsize = np.int64(header[_BLOSC_FLAGS]), np.int64(header[_BLOSC_TYPESIZE])
    block = int32_at(source + _BLOSC_BLOCK_SIZE)
    is_other = flags >> _BLOSC_FORMAT != _BLOSC_LZ4 or flags & (_BLOSC_AS_IT_IS | _BLOSC_BITS)
    if is_other or not 0 < itemsize <= 8 or block <= 0:
        return 0
    n_blocks = -(-expected // block)
    if block % itemsize or expected % itemsize or _BLOSC_HEADER + 4 * n_blocks > size:
        return 0
    is_shuffled = flags & _BLOSC_SHUFFLED and itemsize > 1
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
            if n_stored == n_stream:
                copy_bytes(to, source + at, n_wanted)
            elif n_wanted > 0:
                stream = source + at, n_stored, to, n_stream, n_wanted
                if _lz4_block(*stream, functions) < n_wanted:
                    return 0
            n_decompressed += n_wanted
            at += n_stored
        if is_shuffled:
            _join_planes(work, n // itemsize, begin, end, out, itemsize)
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


@compiled("void(int64, int64, int64, int64)", callback=True)
def unshuffle(source, size, target, itemsize):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Undo HDF5's shuffle filter, which groups the bytes of elements by position."""
    n = size // itemsize
    _join_planes(source, n, 0, n, target, itemsize)
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
