"""Compiled: decompressing chunks. Each codec has a branch here; `_codecs` describes them."""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed._chunks._kernels._codecs import BLOSC, GZIP, LZ4, LZF, STORED, ZLIB, ZSTD
from cellfeed._chunks._kernels._native import (
    BLOSC_DECOMPRESS,
    BLOSC_VALIDATE,
    GZIP_DECOMPRESS,
    LZ4_DECOMPRESS,
    ZLIB_DECOMPRESS,
    ZSTD_DECOMPRESS,
    call,
    copy_bytes,
    pointer,
)
from cellfeed._chunks._kernels._tables import (
    CODEC,
    DECODED_BYTES,
    DELTA,
    FLAGS,
    SHUFFLED,
    SIZE,
    UNCOMPRESSED,
    UNDECODABLE,
    WRONG_SIZE,
)
from cellfeed._compiled import compiled

__all__ = ["LZ4_HEADER", "decompress", "is_compressed", "lzf", "unshuffle"]

LZ4_HEADER = 4  # of numcodecs' header, which contains the size


@compiled("int64(int64, int64, int64, int64, int64)")
def lzf(source: int, size: int, target: int, capacity: int, wanted: int) -> int:
    """Decompress LZF (liblzf's format, as h5py writes it); the bytes written, -1 if damaged.

    It stops once ``wanted`` bytes are written.
    """
    ins = carray(pointer(source), (size,), np.uint8)
    out = carray(pointer(target), (capacity,), np.uint8)
    i = o = np.int64(0)
    while i < size and o < wanted:
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
        for j in range(n):  # byte by byte, since source and target may overlap
            out[o + j] = out[start + j]
        o += n
    return int(o)


@compiled("int64(int64, int64, int64, int64, int64[::1])")
def _lz4(source: int, size: int, target: int, capacity: int, functions: NDArray[np.int64]) -> Any:
    """Decompress LZ4 as numcodecs writes it; return the bytes written, negative if damaged."""
    if size <= LZ4_HEADER:
        return -1
    begin, n_compressed = source + LZ4_HEADER, size - LZ4_HEADER
    return np.int32(call(functions[LZ4_DECOMPRESS], (begin, target, n_compressed, capacity)))


@compiled("void(int64, int64, int64, int64)")
def unshuffle(source: int, size: int, target: int, itemsize: int) -> None:
    """Undo HDF5's shuffle filter, which groups the bytes of elements by position."""
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
    elif itemsize == 8:
        out8 = carray(pointer(target), (n,), np.uint64)
        for i in range(n):
            element = np.uint64(ins[i])
            for byte in range(1, 8):
                element |= np.uint64(ins[byte * n + i]) << np.uint64(8 * byte)
            out8[i] = element
    else:
        out = carray(pointer(target), (size,), np.uint8)
        for i in range(n):
            for byte in range(itemsize):
                out[i * itemsize + byte] = ins[byte * n + i]
    if size % itemsize:
        copy_bytes(target + n * itemsize, source + n * itemsize, size % itemsize)


@compiled("boolean(int64[::1], int64[::1])")
def is_compressed(array: NDArray[np.int64], chunk: NDArray[np.int64]) -> bool:
    """Return whether a chunk is compressed."""
    return array[CODEC] != STORED and not chunk[FLAGS] & UNCOMPRESSED


@compiled("int64(int64[::1], int64[::1], int64, int64, int64[::1], int64, int64)")
def decompress(
    array: NDArray[np.int64],
    chunk: NDArray[np.int64],
    source: int,
    target: int,
    functions: NDArray[np.int64],
    zlib: int,
    zstd: int,
) -> int:
    """Decompress a chunk, if compressed, to exactly its expected size; return 0, or a failure."""
    size, expected = chunk[SIZE], array[DECODED_BYTES]
    if not is_compressed(array, chunk):
        # Uncompressed chunks were cut to the wanted elements, unless they are shuffled.
        whole = array[CODEC] != STORED or array[SHUFFLED] or array[DELTA]
        return WRONG_SIZE if whole and size != expected else 0
    if array[CODEC] in (ZLIB, GZIP):
        # Without an address for the size, libdeflate fails unless the output is full.
        function = ZLIB_DECOMPRESS if array[CODEC] == ZLIB else GZIP_DECOMPRESS
        result = np.int32(call(functions[function], (zlib, source, size, target, expected, 0)))
        if result == 0:
            return 0
        return UNDECODABLE if result == 1 else WRONG_SIZE
    if array[CODEC] == ZSTD:
        n = call(functions[ZSTD_DECOMPRESS], (zstd, target, expected, source, size))
        if 0 <= n <= expected:
            return 0 if n == expected else WRONG_SIZE
        return UNDECODABLE
    if array[CODEC] == BLOSC:
        stated = np.zeros(1, np.int64)
        address = stated.ctypes.data
        if np.int32(call(functions[BLOSC_VALIDATE], (source, size, address))) != 0:
            return UNDECODABLE
        if stated[0] != expected:
            return WRONG_SIZE
        n = np.int64(np.int32(call(functions[BLOSC_DECOMPRESS], (source, target, expected, 1))))
        return 0 if n == expected else UNDECODABLE
    n = np.int64(-1)
    if array[CODEC] == LZ4:
        n = np.int64(_lz4(source, size, target, expected, functions))
    elif array[CODEC] == LZF:
        n = np.int64(lzf(source, size, target, expected, expected + 1))
    if n < 0:
        return UNDECODABLE
    return 0 if n == expected else WRONG_SIZE
