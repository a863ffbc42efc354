"""Compiled: decompressing only the beginning of a chunk, if its codec allows it.

Deflate, LZ4 and LZF write sequentially, so a short buffer receives the head of a chunk; Blosc and
Zstandard consist of blocks. This skips checks that need the end of a chunk: its checksum, and its
size.
"""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._chunks._kernels._codecs import BLOSC, GZIP, LZ4, LZF, ZLIB, ZSTD
from cellfeed._chunks._kernels._decompression import LZ4_HEADER, is_compressed, lzf
from cellfeed._chunks._kernels._native import (
    BLOSC_GETITEM,
    BLOSC_VALIDATE,
    GZIP_DECOMPRESS,
    LZ4_DECOMPRESS_HEAD,
    ZLIB_DECOMPRESS,
    ZSTD_START_STREAM,
    ZSTD_STREAM,
    call,
    pointer,
)
from cellfeed._chunks._kernels._planning import extent
from cellfeed._chunks._kernels._tables import (
    ARRAY,
    CHECKED,
    CODEC,
    DECODED_BYTES,
    END_SEGMENT,
    EVERY_TIME,
    FIRST_SEGMENT,
    FLAGS,
    ITEMSIZE,
    NEVER,
    NUMBER,
    PLACING,
    SHUFFLED,
    SIZE,
    UNSHUFFLED,
)
from cellfeed._compiled import compiled

__all__ = ["decompress_head", "head_sizes", "mark_checked", "wanted_bytes"]

# libdeflate stops at a match (of at most 258 bytes) that does not fit into the buffer, so all
# bytes before it are right; up to 39 wrong bytes may follow them. If a stored block of up to 64 KiB
# does not fit, nothing of it is written: then the mark is still there.
_MARK_AT, _HEAD_MARGIN = 64, 384
_MARK = np.uint64(0x9E3779B97F4A7C15)
_INSUFFICIENT_SPACE = 3

_ZSTD_BLOCK = 1 << 17
_ZSTD_ERRORS = -256  # results from here to -1 are errors
_BLOSC_TYPESIZE, _BLOSC_BLOCK_SIZE, _BLOSC_HEADER = 3, 8, 16  # positions in the header; its size


@compiled("boolean(int64[::1], int64[::1])")
def _is_checked(array: NDArray[np.int64], chunk: NDArray[np.int64]) -> bool:
    """Return whether a chunk may be decompressed partially."""
    if array[CHECKED] in (EVERY_TIME, NEVER):
        return bool(array[CHECKED] == NEVER)
    bits = carray(pointer(array[CHECKED] + (chunk[NUMBER] >> 3)), (1,), np.uint8)
    return bool((bits[0] >> (chunk[NUMBER] & 7)) & 1)


@compiled("void(int64[::1], int64[::1])")
def mark_checked(array: NDArray[np.int64], chunk: NDArray[np.int64]) -> None:
    """Record that a chunk was decompressed completely.

    If two threads mark adjacent chunks at the same time, one mark may be lost; that chunk is then
    decompressed completely once more.
    """
    if array[CHECKED] in (EVERY_TIME, NEVER):
        return
    bits = carray(pointer(array[CHECKED] + (chunk[NUMBER] >> 3)), (1,), np.uint8)
    bits[0] |= np.uint8(1 << (chunk[NUMBER] & 7))


@compiled("int64(int64[::1], int64[::1], int64[:,::1])")
def wanted_bytes(
    array: NDArray[np.int64], chunk: NDArray[np.int64], segments: NDArray[np.int64]
) -> int:
    """Return how many bytes of a chunk, from its first, have to be decompressed."""
    whole = array[DECODED_BYTES]
    is_shuffled = array[SHUFFLED] and not chunk[FLAGS] & UNSHUFFLED
    if is_shuffled or not is_compressed(array, chunk) or not _is_checked(array, chunk):
        return int(whole)
    n_elements = 0
    for k in range(len(segments)):
        _, stop = extent(segments[k], array[PLACING])
        n_elements = max(n_elements, stop)
    return int(min(whole, n_elements * array[ITEMSIZE]))


@compiled("int64(int64[::1], int64[::1], int64, int64, int64, int64[::1], int64)")
def _inflate_head(
    array: NDArray[np.int64],
    chunk: NDArray[np.int64],
    source: int,
    target: int,
    wanted: int,
    functions: NDArray[np.int64],
    zlib: int,
) -> int:
    n = wanted + _HEAD_MARGIN
    if n >= array[DECODED_BYTES]:
        return 0
    mark = carray(pointer(target + wanted + _MARK_AT), (1,), np.uint64)
    mark[0] = _MARK
    function = ZLIB_DECOMPRESS if array[CODEC] == ZLIB else GZIP_DECOMPRESS
    result = np.int32(call(functions[function], (zlib, source, chunk[SIZE], target, n, 0)))
    return n if result == _INSUFFICIENT_SPACE and mark[0] != _MARK else 0


@compiled("int64(int64[::1], int64[::1], int64, int64, int64, int64[::1], int64)")
def _zstd_head(
    array: NDArray[np.int64],
    chunk: NDArray[np.int64],
    source: int,
    target: int,
    wanted: int,
    functions: NDArray[np.int64],
    zstd: int,
) -> int:
    n = -(-wanted // _ZSTD_BLOCK) * _ZSTD_BLOCK  # whole blocks are decompressed anyway
    if n >= array[DECODED_BYTES] or not functions[ZSTD_STREAM]:
        return 0
    call(functions[ZSTD_START_STREAM], (zstd,))
    out = np.array([target, wanted, 0], np.int64)  # address, size, position
    ins = np.array([source, chunk[SIZE], 0], np.int64)
    out_address, in_address = out.ctypes.data, ins.ctypes.data
    while out[2] < wanted:
        before = out[2] + ins[2]
        result = call(functions[ZSTD_STREAM], (zstd, out_address, in_address))
        if _ZSTD_ERRORS <= result <= 0 or out[2] + ins[2] == before:
            break
    return n if out[2] == wanted else 0


@compiled("int64(int64[::1], int64[::1], int64, int64, int64, int64[::1])")
def _blosc_head(
    array: NDArray[np.int64],
    chunk: NDArray[np.int64],
    source: int,
    target: int,
    wanted: int,
    functions: NDArray[np.int64],
) -> int:
    if chunk[SIZE] < _BLOSC_HEADER or not functions[BLOSC_GETITEM]:
        return 0
    stated = np.zeros(1, np.int64)
    address = stated.ctypes.data
    if np.int32(call(functions[BLOSC_VALIDATE], (source, chunk[SIZE], address))) != 0:
        return 0
    typesize = np.int64(carray(pointer(source + _BLOSC_TYPESIZE), (1,), np.uint8)[0])
    block = np.int64(carray(pointer(source + _BLOSC_BLOCK_SIZE), (1,), np.int32)[0])
    if stated[0] != array[DECODED_BYTES] or typesize == 0 or block <= 0 or block % typesize:
        return 0
    n = -(-wanted // block) * block
    if n >= stated[0]:
        return 0
    n_items = -(-wanted // typesize)
    result = np.int32(call(functions[BLOSC_GETITEM], (source, 0, n_items, target)))
    return int(n) if result == n_items * typesize else 0


@compiled("int64(int64[::1], int64[::1], int64, int64, int64, int64[::1], int64, int64)")
def decompress_head(
    array: NDArray[np.int64],
    chunk: NDArray[np.int64],
    source: int,
    target: int,
    wanted: int,
    functions: NDArray[np.int64],
    zlib: int,
    zstd: int,
) -> int:
    """Decompress the first bytes of a compressed chunk, at least ``wanted``.

    Returns
    -------
    Number of bytes that were decompressed; 0 if the codec cannot stop there, or the chunk is
    damaged: then the chunk has to be decompressed completely, which shows the damage.
    """
    codec = array[CODEC]
    if codec in (ZLIB, GZIP):
        return int(_inflate_head(array, chunk, source, target, wanted, functions, zlib))
    if codec == ZSTD:
        return int(_zstd_head(array, chunk, source, target, wanted, functions, zstd))
    if codec == BLOSC:
        return int(_blosc_head(array, chunk, source, target, wanted, functions))
    n = 0
    if codec == LZ4 and functions[LZ4_DECOMPRESS_HEAD] and chunk[SIZE] > LZ4_HEADER:
        begin, n_compressed = source + LZ4_HEADER, chunk[SIZE] - LZ4_HEADER
        arguments = (begin, target, n_compressed, wanted, array[DECODED_BYTES])
        n = int(np.int32(call(functions[LZ4_DECOMPRESS_HEAD], arguments)))
    elif codec == LZF:
        n = int(lzf(source, chunk[SIZE], target, array[DECODED_BYTES], wanted))
    return n if n >= wanted else 0


@compiled("int64[::1](int64[:,::1], int64[:,::1], int64[:,::1])")
def head_sizes(
    arrays: NDArray[np.int64], chunks: NDArray[np.int64], segments: NDArray[np.int64]
) -> Any:
    """Return how many bytes of each chunk have to be decompressed, shape (n_chunks,)."""
    sizes = np.empty(len(chunks), np.int64)
    for c in range(len(chunks)):
        own = segments[chunks[c, FIRST_SEGMENT] : chunks[c, END_SEGMENT]]
        sizes[c] = wanted_bytes(arrays[chunks[c, ARRAY]], chunks[c], own)
    return sizes
