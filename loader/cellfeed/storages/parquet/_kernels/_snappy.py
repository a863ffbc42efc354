"""Compiled: decompressing Snappy, which only Parquet files have."""

from typing import Any

import numpy as np

from cellfeed.decode._kernels import _codecs as codecs
from cellfeed.decode._kernels._native import copy_bytes, elements, load_word, store_word
from cellfeed.extending import compiled


@compiled(codecs.SIGNATURE, callback=True)
def snappy(source, size, target, expected, first, wanted, functions, zlib, zstd, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001, PLR0912 - one for each tag
    """Decompress Snappy; return the bytes written, or -1 if it is damaged or of another size.

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
        return -1
    most = wanted if wanted < expected else expected + 1
    while i < size and o < most:
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
    return o if o >= wanted else -1
