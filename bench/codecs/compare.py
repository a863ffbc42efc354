"""Compare codecs for column indices and counts: bytes and nanoseconds per non-zero, in turns.

Takes .h5ad files. Their cells are taken in random order, as in a shuffled store, each with
ascending columns; log-normalized values are converted back to counts. Indices and counts are
encoded chunk by chunk with the codecs of numcodecs, and decoded by C libraries and compiled code
to int32 and float32, in memory that stays in the cache. In each round each candidate has a turn
with one thread and one with two. They are compared with cellstream's frames of the same cells:
their bytes, and the time of `gather_rows` for all of them in archive order. Nanoseconds are
processor time unless marked wall; compare ratios.
"""

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anndata as ad
import numba
import numpy as np
import scipy.sparse as sp
from numba import carray
from numcodecs import LZ4, Blosc, Delta, FixedScaleOffset, Shuffle, Zlib, Zstd

from cellfeed._decode._kernels import _codecs as c_functions
from cellfeed._decode._kernels import _native as native

try:
    import cellstream
    from cellstream.cell import write_cell_archive
except ImportError:
    cellstream = None
try:
    from pcodec import ChunkConfig, standalone
except ImportError:
    standalone = None

LZ4_KIND, ZSTD_KIND, ZLIB_KIND, BLOSC_KIND = range(4)
WIDEN, ADD_UP, JOIN, JOIN_ADD_UP, COPY, TO_FLOAT, JOIN_TO_FLOAT, FROM_ONE, JOIN_FROM_ONE = range(9)
LEAST = 4_000_000  # non-zeros decoded in a turn


@numba.njit(nogil=True, cache=True)
def to_columns(decoded, n, out, is_joined, is_sum):
    """Convert unsigned 16-bit integers, or their two planes of bytes, to int32 columns."""
    narrow = carray(native.pointer(decoded.ctypes.data), (n,), np.uint16)
    total = np.uint16(0)
    if is_joined and is_sum:
        for i in range(n):
            total = np.uint16(total + (np.uint16(decoded[i]) | np.uint16(decoded[n + i]) << 8))
            out[i] = total
    elif is_joined:
        for i in range(n):
            out[i] = np.int32(decoded[i]) | np.int32(decoded[n + i]) << 8
    elif is_sum:
        for i in range(n):
            total = np.uint16(total + narrow[i])
            out[i] = total
    else:
        for i in range(n):
            out[i] = narrow[i]


@numba.njit(nogil=True, cache=True)
def to_counts(decoded, n, out, is_joined, offset):
    """Convert unsigned 16-bit integers, or their two planes of bytes, to float32 counts."""
    narrow = carray(native.pointer(decoded.ctypes.data), (n,), np.uint16)
    if is_joined:
        for i in range(n):
            out[i] = offset + (np.int32(decoded[i]) | np.int32(decoded[n + i]) << 8)
    else:
        for i in range(n):
            out[i] = offset + np.int32(narrow[i])


@numba.njit(nogil=True, cache=True)
def finish(how, decoded, n, out, out_float):
    """Convert decoded bytes to int32 columns, or float32 counts."""
    if how == COPY:
        native.copy_bytes(out.ctypes.data, decoded.ctypes.data, n * 4)
    elif how < COPY:
        is_joined, is_sum = how in (JOIN, JOIN_ADD_UP), how in (ADD_UP, JOIN_ADD_UP)
        to_columns(decoded, n, out, is_joined, is_sum)
    else:
        is_joined, offset = how in (JOIN_TO_FLOAT, JOIN_FROM_ONE), int(how >= FROM_ONE)
        to_counts(decoded, n, out_float, is_joined, offset)


@numba.njit(nogil=True, cache=True)
def decode(
    kind, how, payload, starts, n, itemsize, functions, first, stop, decoded, out, out_float
):
    zstd = native.call(functions[c_functions.ZSTD_NEW], ())
    zlib = native.call(functions[c_functions.DEFLATE_NEW], ())
    target, size = decoded.ctypes.data, n * itemsize
    for c in range(first, stop):
        source, stored = payload.ctypes.data + starts[c], starts[c + 1] - starts[c]
        if kind == LZ4_KIND:
            native.call(
                functions[c_functions.LZ4_DECOMPRESS], (source + 4, target, stored - 4, size)
            )
        elif kind == ZSTD_KIND:
            native.call(
                functions[c_functions.ZSTD_DECOMPRESS], (zstd, target, size, source, stored)
            )
        elif kind == ZLIB_KIND:
            native.call(
                functions[c_functions.ZLIB_DECOMPRESS], (zlib, source, stored, target, size, 0)
            )
        else:
            native.call(functions[c_functions.BLOSC_DECOMPRESS], (source, target, size, 1))
        finish(how, decoded, n, out, out_float)
    native.call(functions[c_functions.ZSTD_FREE], (zstd,))
    native.call(functions[c_functions.DEFLATE_FREE], (zlib,))


class Candidate:
    """The encoded chunks of one array, and how to decode them."""

    def __init__(self, codecs, kind, how, values, n):
        self.kind, self.how, self.n, self.itemsize = kind, how, n, values.itemsize
        n_chunks = len(values) // n
        self.expected = values[(n_chunks - 1) * n : n_chunks * n].astype(
            np.float32 if how >= COPY else np.int32
        )
        stored = []
        for chunk in values[: n_chunks * n].reshape(n_chunks, n):
            encoded = functools.reduce(lambda each, codec: codec.encode(each), codecs, chunk)
            stored.append(np.frombuffer(bytes(memoryview(encoded).cast("B")), np.uint8))
        self.starts = np.cumsum([0, *map(len, stored)])
        self.payload = np.concatenate(stored)
        # A shard's index has 16 bytes per chunk.
        self.bytes = (len(self.payload) + 16 * n_chunks) / (n_chunks * n)
        self.buffers = [self._buffers() for _ in range(2)]

    def _buffers(self):
        n = self.n
        return np.empty(n * self.itemsize, np.uint8), np.empty(n, np.int32), np.empty(n, np.float32)

    def run(self, first, stop, thread):
        decode(
            self.kind, self.how, self.payload, self.starts, self.n, self.itemsize,
            c_functions.function_addresses(), first, stop, *self.buffers[thread],
        )  # fmt: skip

    def check(self):
        self.run(len(self.starts) - 2, len(self.starts) - 1, 0)
        found = self.buffers[0][2 if self.how >= TO_FLOAT else 1]
        found = found.view(np.float32) if self.how == COPY else found
        if not np.array_equal(found, self.expected):
            sys.exit("a decoded chunk differs")


class Pcodec(Candidate):
    """An array encoded by pcodec, through its Python functions."""

    def __init__(self, values, n):
        n_chunks = len(values) // n
        config = ChunkConfig()
        chunks = values[: n_chunks * n].reshape(n_chunks, n)
        self.stored = [standalone.simple_compress(chunk, config) for chunk in chunks]
        self.starts, self.n = np.zeros(n_chunks + 1), n
        self.bytes = (sum(map(len, self.stored)) + 16 * n_chunks) / (n_chunks * n)
        self.out = [np.empty(n, values.dtype) for _ in range(2)]

    def run(self, first, stop, thread):
        for stored in self.stored[first:stop]:
            standalone.simple_decompress_into(stored, self.out[thread])

    def check(self):
        pass


def candidates(indices, counts, n):
    """Yield names and candidates, in chunks of n; indices first."""
    delta, planes = Delta(np.uint16), Shuffle(2)
    bits, blosc = Blosc.BITSHUFFLE, functools.partial(Blosc, shuffle=Blosc.SHUFFLE)
    less_one = FixedScaleOffset(1, 1, "<f4", "<u2")
    for what, filters, values, plain, joined in (
        ("indices u2", [], indices, WIDEN, JOIN),
        ("delta u2", [delta], indices, ADD_UP, JOIN_ADD_UP),
        ("counts u2", [], counts.astype(np.uint16), TO_FLOAT, JOIN_TO_FLOAT),
        ("counts - 1 u2", [less_one], counts, FROM_ONE, JOIN_FROM_ONE),
    ):
        for name, codecs, kind, how in (
            ("blosc lz4 3 shuffle", [blosc("lz4", 3)], BLOSC_KIND, plain),
            ("blosc lz4 9 shuffle", [blosc("lz4", 9)], BLOSC_KIND, plain),
            ("blosc lz4hc 9 shuffle", [blosc("lz4hc", 9)], BLOSC_KIND, plain),
            ("blosc lz4 3 bitshuffle", [blosc("lz4", 3, shuffle=bits)], BLOSC_KIND, plain),
            ("blosc lz4 9 bitshuffle", [blosc("lz4", 9, shuffle=bits)], BLOSC_KIND, plain),
            ("blosc lz4hc 9 bitshuffle", [blosc("lz4hc", 9, shuffle=bits)], BLOSC_KIND, plain),
            ("blosc zstd 3 shuffle", [blosc("zstd", 3)], BLOSC_KIND, plain),
            ("shuffle, lz4", [planes, LZ4()], LZ4_KIND, joined),
            ("shuffle, zstd 1", [planes, Zstd(1)], ZSTD_KIND, joined),
            ("shuffle, zlib 1", [planes, Zlib(1)], ZLIB_KIND, joined),
        ):
            yield f"{what}, {name}", Candidate([*filters, *codecs], kind, how, values, n)
        if standalone is not None and what in ("delta u2", "counts u2"):
            own = np.diff(values, prepend=np.uint16(0)) if filters else values
            yield f"{what}, pcodec", Pcodec(own, n)
    yield (
        "counts f4, blosc lz4 3 shuffle",
        Candidate([blosc("lz4", 3)], BLOSC_KIND, COPY, counts, n),
    )
    yield "counts f4, zstd 1", Candidate([Zstd(1)], ZSTD_KIND, COPY, counts, n)


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
                sys.exit(f"{path}: values are not log-normalized counts")
            X.data = np.round(X.data).astype(np.float32)
        parts.append(X)
    X = sp.vstack(parts, "csr")
    return X[np.random.default_rng(0).permutation(X.shape[0])]


class Archive:
    """cellstream's frames of the same cells."""

    def __init__(self, X, folder):
        path = Path(folder) / "cells.csad"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_cell_archive(ad.AnnData(X), path)
        self.store, self.n = cellstream.open(path), X.shape[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_cell_archive(ad.AnnData(X[:1]), path.with_name("cell.csad"))
        # Exclude what does not grow with the cells, such as gene names.
        fixed = path.with_name("cell.csad").stat().st_size
        self.nnz, self.bytes = X.nnz, (path.stat().st_size - fixed) / X.nnz

    def run(self, threads):
        for first in range(0, self.n, 1024):
            rows = np.arange(first, min(first + 1024, self.n))
            self.store.gather_rows(rows, n_threads=threads)
        return self.nnz


def turn(candidate, threads, pool):
    """Return ns per non-zero: processor time, and wall time."""
    start, used, n = time.perf_counter(), time.process_time(), 0
    if isinstance(candidate, Archive):
        while n < LEAST:
            n += candidate.run(threads)
    else:
        n_chunks = len(candidate.starts) - 1
        share = -(-n_chunks // threads)
        while n < LEAST:
            jobs = [
                pool.submit(candidate.run, k * share, min((k + 1) * share, n_chunks), k)
                for k in range(threads)
            ]
            for job in jobs:
                job.result()
            n += n_chunks * candidate.n
    wall, used = time.perf_counter() - start, time.process_time() - used
    return used / n * 1e9, wall / n * 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 4096, 16384, 131072])
    parser.add_argument("--grep", default="", help="only candidates with this in their names")
    options = parser.parse_args()
    X = cells_of(options.paths)
    sys.stdout.write(f"{X.shape[0]:,} cells, {X.nnz / X.shape[0]:,.0f} non-zeros per cell\n")
    indices, counts = X.indices.astype(np.uint16), X.data.astype(np.float32)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        tried = {}
        if cellstream is not None:
            tried["cellstream, both", 0] = Archive(X, folder)
        for n in options.chunks:
            for name, candidate in candidates(indices, counts, n):
                if options.grep in name:
                    candidate.check()
                    tried[name, n] = candidate
        found = {}
        for _ in range(options.rounds):
            for key, threads in itertools.product(tried, (1, 2)):
                found.setdefault((key, threads), []).append(turn(tried[key], threads, pool))
    for (name, n), candidate in tried.items():
        one, two = (
            [statistics.median(each) for each in zip(*found[(name, n), k], strict=True)]
            for k in (1, 2)
        )
        sys.stdout.write(
            f"| {name} | {n or 'a cell'} | {candidate.bytes:.3f} | {one[0]:.2f} | "
            f"{one[1]:.2f} | {two[1]:.2f} |\n"
        )


if __name__ == "__main__":
    main()
