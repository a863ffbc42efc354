"""Damages chunks and files over and over; run in a process of its own, which may crash.

``python fuzzing.py chunks N`` decodes damaged chunks into memory that ends where the process may
not read or write. ``python fuzzing.py files N PATH ...`` reads damaged files. Both tell how often
what happened.
"""

import collections
import ctypes
import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import numpy.typing as npt

from cellfeed import CellfeedError, open_collection
from cellfeed.decode import _kernels as kernels
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._codecs import BLOSC, GZIP, LZ4, LZF, ZLIB, ZSTD, function_addresses
from cellfeed.sources import ByteStore, ChunkedArray, ChunkTable, Location

Bytes = npt.NDArray[np.uint8]

CODECS = {
    "zlib": ZLIB,
    "gzip": GZIP,
    "zstd": ZSTD,
    "lz4": LZ4,
    "lzf": LZF,
    "blosc blosclz": BLOSC,
    "blosc lz4": BLOSC,
    "blosc zlib": BLOSC,
    "blosc zstd": BLOSC,
}
_PROT_NONE = 0


def encode(codec: str, values: npt.NDArray[Any]) -> bytes:
    """Compress values as they lie in a file."""
    name, _, cname = codec.partition(" ")
    if name == "lzf":
        return lzf_chunk(values)
    if name == "blosc":
        return bytes(numcodecs.Blosc(cname=cname, blocksize=512).encode(values))
    if name == "lz4":
        return bytes(numcodecs.LZ4().encode(values))[4:]  # without its header
    compressors = {"zlib": numcodecs.Zlib, "gzip": numcodecs.GZip, "zstd": numcodecs.Zstd}
    return bytes(compressors[name]().encode(values))


def lzf_chunk(values: npt.NDArray[Any]) -> bytes:
    """Compress as h5py does; what cannot be compressed comes back as it is."""
    with h5py.File("lzf", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("x", data=values, chunks=values.shape, compression="lzf")
        file.flush()
        return bytes(dataset.id.read_direct_chunk((0,) * values.ndim)[1])


def fenced(n: int) -> Bytes:
    """Return memory after which the process may not read or write."""
    page = mmap.PAGESIZE
    size = max(1, -(-n // page)) * page
    pages = mmap.mmap(-1, size + page)
    memory = np.frombuffer(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    fence = ctypes.c_void_p(memory.ctypes.data + size)
    if libc.mprotect(fence, ctypes.c_size_t(page), _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    return memory[size - n : size]


class MemoryFile(ByteStore):
    """One file in memory, which holds one chunk."""

    def __init__(self, content: bytes = b"") -> None:
        self.descriptor = os.memfd_create("chunk")
        self.write(content)

    def write(self, content: bytes) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, content, 0)

    def handles(self, files: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], object]:
        return np.full(len(files), self.descriptor, np.int64), self

    def location_of(self, file: int) -> Location:
        return Location("chunk")

    def sizes(self, files: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.full(len(files), os.fstat(self.descriptor).st_size, np.int64)


class FencedDecoder:
    """Decodes one chunk at a time, with each piece of memory in front of a fence."""

    def __init__(self, codec: str, n_elements: int, dtype: npt.DTypeLike) -> None:
        self._codec, self._n, self._dtype = CODECS[codec], n_elements, np.dtype(dtype)
        self._file = MemoryFile()
        n_bytes = n_elements * self._dtype.itemsize
        self._buffers = fenced(n_bytes), fenced(n_bytes)
        self._scratch = np.empty(0, np.uint8)
        self._out = fenced(n_bytes)
        self._raw = fenced(4 * n_bytes + 4096)

    def decode(self, stored: bytes, n_wanted: int) -> tuple[int, npt.NDArray[Any]]:
        """Return the failure (0 if there is none), and the first elements."""
        self._file.write(stored)
        array = ChunkedArray(
            name="x",
            shape=(self._n,),
            dtype=self._dtype,
            chunk_shape=(self._n,),
            codec=self._codec,
            locations=ChunkTable(
                np.zeros(1, np.int64), np.array([len(stored)], np.int64), np.zeros(1, np.uint8)
            ),
            files=self._file,
            lost_is_zero=True,
        )
        out = self._out.view(self._dtype)
        starts, counts = np.zeros(1, np.int64), np.array([n_wanted], np.int64)
        places = np.array([out.ctypes.data], np.int64)
        reads = array.reads_of_ranges(starts, counts, places, self._dtype)
        reads.arrays[:, fields.CHECKED] = fields.NEVER
        report = np.zeros(fields.N_REPORTS, np.int64)
        raw = self._raw[self._raw.size - len(stored) :]
        tables = reads.arrays, reads.chunks, reads.segments
        kernels.resolve(reads.arrays)
        kernels.decode(*tables, function_addresses(), report, raw, *self._buffers, self._scratch)
        return int(report[fields.FAILURE]), out[:n_wanted]


def damage(stored: bytes, rng: np.random.Generator) -> bytes:
    """Return the same bytes, but for a flip, a number, a piece, or an end that is missing."""
    content = bytearray(stored)
    for _ in range(rng.integers(1, 4)):
        where = int(rng.integers(len(content)))
        where = where if rng.random() < 0.5 else min(where, int(rng.integers(40)))
        kind = rng.integers(5)
        if kind <= 1:
            content[where] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            odd = rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, int(rng.integers(1 << 20))])
            content[where : where + 4] = int(odd).to_bytes(4, "little")[: len(content) - where]
        elif kind == 3:
            begin = int(rng.integers(len(content)))
            piece = content[begin : begin + int(rng.integers(1, 64))]
            content[where : where + len(piece)] = piece[: len(content) - where]
        elif len(content) > 1:
            del content[max(1, where) :]
    return bytes(content)


def fuzz_chunks(codec: str, n: int) -> collections.Counter[str]:
    """Decode damaged chunks; return how often what happened."""
    rng, results = np.random.default_rng(0), collections.Counter[str]()
    for _ in range(10):
        n_elements = int(rng.integers(1, 3000))
        values = rng.poisson(rng.choice([0.05, 1.0, 300.0]), n_elements).astype(np.float32)
        stored = encode(codec, values)
        decoder = FencedDecoder(codec, n_elements, np.float32)
        if codec != "lzf" or len(stored) < values.nbytes:
            for n_wanted in (n_elements, *rng.integers(1, n_elements + 1, 5).tolist()):
                failure, decoded = decoder.decode(stored, n_wanted)
                assert failure == 0, failure
                assert np.array_equal(decoded, values[:n_wanted])
        for _ in range(n // 10):
            n_wanted = n_elements if rng.random() < 0.5 else int(rng.integers(1, n_elements + 1))
            failure, decoded = decoder.decode(damage(stored, rng), n_wanted)
            same = np.array_equal(decoded, values[:n_wanted])
            other = "other values" if n_wanted == n_elements else "other head"
            results["told" if failure else "same" if same else other] += 1
    return results


def fuzz_file(path: Path, n: int) -> collections.Counter[str]:
    """Read a file with damaged bytes; return how often what happened."""
    rng, results = np.random.default_rng(0), collections.Counter[str]()
    whole, expected = path.read_bytes(), rows_of(path)
    places = np.arange(len(whole))
    for heap in re.finditer(b"GCOL", whole):  # HDF5 itself may loop for ever over a damaged one
        n_bytes = int.from_bytes(whole[heap.start() + 8 : heap.start() + 16], "little")
        places = places[(places < heap.start()) | (places >= heap.start() + n_bytes)]
    for k in range(n):
        content = bytearray(whole)
        for where in rng.choice(places, rng.integers(1, 4), replace=False).tolist():
            content[where] ^= 1 << int(rng.integers(8))
        damaged = path.with_name(f"damaged{k}.h5ad")
        damaged.write_bytes(content)
        try:
            rows = rows_of(damaged)
        except CellfeedError as error:
            message = str(error)
            assert message.startswith(str(damaged)), message
            assert "\n" not in message, message
            results["told"] += 1
        else:
            results["same" if np.array_equal(rows, expected, equal_nan=True) else "other rows"] += 1
        damaged.unlink()
    return results


def rows_of(path: Path) -> npt.NDArray[Any]:
    """Read all rows in another order than they are stored in."""
    X = open_collection(path, obs=["number"])[::-1].X
    return np.asarray(X if isinstance(X, np.ndarray) else X.toarray())


def tell(name: str, results: collections.Counter[str]) -> None:
    counts = ", ".join(f"{result} {count}" for result, count in sorted(results.items()))
    sys.stdout.write(f"{name}: {counts}\n")


def main(what: str, n: str, *paths: str) -> None:
    for codec in CODECS if what == "chunks" else ():
        tell(codec, fuzz_chunks(codec, int(n)))
    for path in paths:
        tell(path, fuzz_file(Path(path), int(n)))


if __name__ == "__main__":
    main(*sys.argv[1:])
