"""Codecs for column indices and counts: bytes and nanoseconds per non-zero.

The cells of ``--data`` are taken in random order, as in a shuffled store, each with ascending
columns; log-normalized values are converted back to counts. Indices and counts are encoded chunk by
chunk with the codecs of numcodecs, and decoded by C libraries and compiled code to int32 and
float32, in memory that stays in the cache, with one thread and with two. They are compared with
cellstream's frames of the same cells: their bytes, and the time of `gather_rows` for all of them in
archive order. Nanoseconds are processor time.
"""

import functools
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anndata as ad
import numba
import numpy as np
import scipy.sparse as sp
from bench._harness import Case, here, plates_of
from numba import carray
from numcodecs import Blosc, Delta, Shuffle, Zlib, Zstd

from cellfeed.decode._kernels import _codecs as c_functions
from cellfeed.decode._kernels import _native as native

try:
    import cellstream
    from cellstream.cell import write_cell_archive
except ImportError:
    cellstream = None
try:
    from pcodec import ChunkConfig, standalone
except ImportError:
    standalone = None

ZSTD_KIND, ZLIB_KIND, BLOSC_KIND = range(3)
# What decoded bytes become: column indices, differences of these, counts, or counts as they are.
COLUMNS, DIFFERENCES, COUNTS, FLOATS = range(4)


@numba.njit(nogil=True, cache=True)
def finish(how, is_joined, decoded, n, out, out_float):
    """Convert unsigned 16-bit integers, or their two planes of bytes, or copy floats."""
    if how == FLOATS:
        native.copy_bytes(out_float.ctypes.data, decoded.ctypes.data, n * 4)
        return
    narrow, total = carray(native.pointer(decoded.ctypes.data), (n,), np.uint16), np.uint16(0)
    for i in range(n):
        value = narrow[i]
        if is_joined:
            value = np.uint16(np.uint16(decoded[i]) | np.uint16(decoded[n + i]) << 8)
        if how == DIFFERENCES:
            total = np.uint16(total + value)
            out[i] = total
        elif how == COUNTS:
            out_float[i] = np.int32(value)
        else:
            out[i] = value


@numba.njit(nogil=True, cache=True)
def decode(
    kind, how, is_joined, payload, starts, n, itemsize, functions, first, stop, decoded, out,
    out_float,
):  # fmt: skip
    zstd = native.call(functions[c_functions.ZSTD_NEW], ())
    zlib = native.call(functions[c_functions.DEFLATE_NEW], ())
    target, size = decoded.ctypes.data, n * itemsize
    for c in range(first, stop):
        source, stored = payload.ctypes.data + starts[c], starts[c + 1] - starts[c]
        if kind == ZSTD_KIND:
            native.call(
                functions[c_functions.ZSTD_DECOMPRESS], (zstd, target, size, source, stored)
            )
        elif kind == ZLIB_KIND:
            native.call(
                functions[c_functions.ZLIB_DECOMPRESS], (zlib, source, stored, target, size, 0)
            )
        else:
            native.call(functions[c_functions.BLOSC_DECOMPRESS], (source, target, size, 1))
        finish(how, is_joined, decoded, n, out, out_float)
    native.call(functions[c_functions.ZSTD_FREE], (zstd,))
    native.call(functions[c_functions.DEFLATE_FREE], (zlib,))


class Candidate:
    """The encoded chunks of one array, and how to decode them."""

    def __init__(self, codecs, kind, how, values, n):
        self.n, self.n_chunks = n, len(values) // n
        whole = values[: self.n_chunks * n].reshape(self.n_chunks, n)
        stored = []
        for chunk in whole:
            encoded = functools.reduce(lambda each, codec: codec.encode(each), codecs, chunk)
            stored.append(np.frombuffer(bytes(memoryview(encoded).cast("B")), np.uint8))
        starts = np.cumsum([0, *map(len, stored)])
        # A shard's index has 16 bytes per chunk.
        self.bytes = (starts[-1] + 16 * self.n_chunks) / (self.n_chunks * n)
        is_joined = any(isinstance(each, Shuffle) for each in codecs)
        self.given = (kind, how, is_joined, np.concatenate(stored), starts, n, values.itemsize,
                      c_functions.function_addresses())  # fmt: skip
        self.buffers = [
            (np.empty(n * values.itemsize, np.uint8), np.empty(n, np.int32), np.empty(n, "f4"))
            for _ in range(2)
        ]
        self.run(self.n_chunks - 1, self.n_chunks, 0)
        if not np.array_equal(self.buffers[0][1 if how < COUNTS else 2], whole[-1]):
            raise SystemExit("a decoded chunk differs")

    def run(self, first, stop, thread):
        decode(*self.given, first, stop, *self.buffers[thread])


class Pcodec:
    """An array encoded by pcodec, through its Python functions."""

    def __init__(self, values, n):
        self.n, self.n_chunks = n, len(values) // n
        chunks = values[: self.n_chunks * n].reshape(self.n_chunks, n)
        self.stored = [standalone.simple_compress(chunk, ChunkConfig()) for chunk in chunks]
        self.bytes = (sum(map(len, self.stored)) + 16 * self.n_chunks) / (self.n_chunks * n)
        self.out = [np.empty(n, values.dtype) for _ in range(2)]

    def run(self, first, stop, thread):
        for stored in self.stored[first:stop]:
            standalone.simple_decompress_into(stored, self.out[thread])


class Archive:
    """cellstream's frames of the same cells; a chunk is 1,024 cells."""

    def __init__(self, X, folder):
        path = Path(folder) / "cells.csad"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_cell_archive(ad.AnnData(X), path)
            write_cell_archive(ad.AnnData(X[:1]), path.with_name("cell.csad"))
        # Exclude what does not grow with the cells, such as gene names.
        fixed = path.with_name("cell.csad").stat().st_size
        self.store, self.n_cells = cellstream.open(path), X.shape[0]
        self.bytes, self.n_chunks = (path.stat().st_size - fixed) / X.nnz, -(-self.n_cells // 1024)
        self.n = X.nnz / self.n_chunks

    def run(self, first, stop, _thread):
        for chunk in range(first, stop):
            rows = np.arange(1024 * chunk, min(1024 * (chunk + 1), self.n_cells))
            self.store.gather_rows(rows, n_threads=1)


def candidates(indices, counts, n):
    """Yield names and candidates, in chunks of n; indices first."""
    bits, lz4 = Blosc.BITSHUFFLE, functools.partial(Blosc, "lz4", 3)
    narrow, delta = counts.astype(np.uint16), [Delta(np.uint16)]
    for what, filters, values, how in (
        ("indices u2", [], indices, COLUMNS),
        ("delta u2", delta, indices, DIFFERENCES),
        ("counts u2", [], narrow, COUNTS),
        ("counts f4", [], counts, FLOATS),
    ):
        codecs = {
            "blosc lz4": ([lz4(shuffle=Blosc.SHUFFLE)], BLOSC_KIND),
            "blosc lz4, bit shuffle": ([lz4(shuffle=bits)], BLOSC_KIND),
            "blosc lz4hc 9": ([Blosc("lz4hc", 9, Blosc.SHUFFLE)], BLOSC_KIND),
            "blosc lz4hc 9, bit shuffle": ([Blosc("lz4hc", 9, bits)], BLOSC_KIND),
            "shuffle, zstd 1": ([Shuffle(2), Zstd(1)], ZSTD_KIND),
            "shuffle, zlib 1": ([Shuffle(2), Zlib(1)], ZLIB_KIND),
        }
        if how == FLOATS:
            codecs = {"blosc lz4": codecs["blosc lz4"], "zstd 1": ([Zstd(1)], ZSTD_KIND)}
        for name, (each, kind) in codecs.items():
            yield f"{what}, {name}", Candidate([*filters, *each], kind, how, values, n)
        if standalone is not None and how in (DIFFERENCES, COUNTS):
            own = np.diff(values, prepend=np.uint16(0)) if filters else values
            yield f"{what}, pcodec", Pcodec(own, n)


def cells_of(paths):
    """Return the cells as CSR of counts, in random order, with sorted columns."""
    parts = []
    for path in paths:
        X = sp.csr_matrix(ad.read_h5ad(path).X)
        X.sort_indices()
        if (X.data != np.round(X.data)).any():
            least = np.minimum.reduceat(np.expm1(X.data), X.indptr[:-1])
            X.data = np.expm1(X.data) / np.repeat(least, np.diff(X.indptr))
            if np.abs(X.data - np.round(X.data)).max() > 0.05:
                raise SystemExit(f"{path}: values are not log-normalized counts")
            X.data = np.round(X.data).astype(np.float32)
        parts.append(X)
    X = sp.vstack(parts, "csr")
    return X[np.random.default_rng(0).permutation(X.shape[0])]


def decoded(seed, candidate, pool, least):
    """Decode at least so many non-zeros with one and with two threads."""
    found = {"bytes per non-zero": candidate.bytes}
    for n_threads in (1, 2):
        share, n, used = -(-candidate.n_chunks // n_threads), 0, time.process_time()
        while n < least:
            starts = range(0, candidate.n_chunks, share)
            stops = (min(start + share, candidate.n_chunks) for start in starts)
            list(pool.map(candidate.run, starts, stops, range(n_threads)))
            n += candidate.n_chunks * candidate.n
        found[f"ns per non-zero, {n_threads} threads"] = (time.process_time() - used) / n * 1e9
    return found


def cases(options):
    X = cells_of(plates_of(options))
    indices, counts = X.indices.astype(np.uint16), X.data.astype(np.float32)
    title = f"{X.shape[0]:,} cells of {X.nnz / X.shape[0]:,.0f} non-zeros"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        archive = {} if cellstream is None else {"cellstream, both": Archive(X, folder)}
        for n in options.chunks:
            tried = {name: each for name, each in candidates(indices, counts, n)
                     if options.only in name}  # fmt: skip
            ways = {
                name: here(decoded, candidate=each, pool=pool, least=options.least)
                for name, each in (archive | tried).items()
            }
            yield Case(ways, f"{title}, chunks of {n:,}")


OPTIONS = {
    "cells": 2_100,
    "rounds": 5,
    "only": "",
    "least": 4_000_000,
    "n_ratios": 0,
    "chunks": [1024, 4096, 131072],
}
