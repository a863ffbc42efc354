"""Decompression of the chunks of a .h5ad file on a GPU, by nvCOMP.

Needs a GPU, and ``nvidia-libnvcomp-cu13`` (or ``-cu12``). Chunks of ``X/data`` and ``X/indices`` of
the first file of ``--data``, compressed by gzip, are decompressed many at a time, as many as a
fetch needs. All bytes are compared with those of zlib once.
"""

import ctypes
import time
import zlib
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import torch
from bench._harness import Case, here, plates_of, say

ALIGNMENT = 16


class Options(ctypes.Structure):
    """``nvcompBatchedDeflateDecompressOpts_t``; zeros are the defaults."""

    _fields_ = (("backend", ctypes.c_int), ("sorts", ctypes.c_int), ("rest", ctypes.c_char * 56))


def library():
    folder = Path(find_spec("nvidia.libnvcomp").submodule_search_locations[0])
    return ctypes.CDLL(next(folder.glob("lib*/libnvcomp.so*")))


def chunks_of(path, n):
    """Return at most `n` compressed chunks, and the bytes of each decompressed."""
    found, sizes = [], []
    with h5py.File(path) as file:
        arrays = [file["X/data"], file["X/indices"]]
        for array in arrays:
            assert array.compression == "gzip", f"{array.name} is not compressed by gzip"
            assert not array.shuffle, f"{array.name} is shuffled"
        n_chunks = min(array.shape[0] // array.chunks[0] for array in arrays)  # whole ones
        for k in range(min(n // len(arrays), n_chunks)):
            for array in arrays:
                found.append(array.id.read_direct_chunk((k * array.chunks[0],))[1])
                sizes.append(array.chunks[0] * array.dtype.itemsize)
    return found, sizes


def starts_of(sizes):
    """Return where aligned pieces start, and where the last one ends."""
    aligned = -(-np.asarray(sizes) // ALIGNMENT) * ALIGNMENT
    return np.concatenate([[0], np.cumsum(aligned)])


class OnGpu:
    """Decompresses a batch of chunks.

    Parameters
    ----------
    chunks, sizes
        Compressed by zlib, and how many bytes each has decompressed.
    """

    def __init__(self, chunks, sizes):
        self.chunks, self.sizes, self.nvcomp = chunks, sizes, library()
        bare = [each[2:-4] for each in chunks]  # without zlib's header and checksum
        starts, self.ends = starts_of([len(each) for each in bare]), starts_of(sizes)
        packed = np.zeros(starts[-1], np.uint8)
        for start, each in zip(starts, bare, strict=False):
            packed[start : start + len(each)] = np.frombuffer(each, np.uint8)
        self.pinned = torch.from_numpy(packed).pin_memory()
        self.compressed = self.pinned.cuda()
        self.output = torch.zeros(int(self.ends[-1]), dtype=torch.uint8, device="cuda")
        on_gpu = {
            "from": self.compressed.data_ptr() + starts[:-1],
            "n_from": [len(each) for each in bare],
            "to": self.output.data_ptr() + self.ends[:-1],
            "n_to": sizes,
            "written": np.zeros(len(sizes)),
        }
        self.arrays = {
            name: torch.from_numpy(np.asarray(each, np.int64)).cuda()
            for name, each in on_gpu.items()
        }
        self.statuses = torch.full((len(sizes),), -1, dtype=torch.int32, device="cuda")
        n_bytes = ctypes.c_size_t()
        self.call(
            "GetTempSize", *map(ctypes.c_size_t, (len(sizes), max(sizes))), Options(),
            ctypes.byref(n_bytes), ctypes.c_size_t(sum(sizes)), None,
        )  # fmt: skip
        self.scratch = torch.empty(max(1, n_bytes.value), dtype=torch.uint8, device="cuda")

    def call(self, name, *arguments):
        status = getattr(self.nvcomp, f"nvcompBatchedDeflateDecompress{name}")(*arguments)
        assert status == 0, f"nvCOMP: status {status}"

    def run(self, *, copies):
        """Decompress; first copy from pinned memory if `copies`."""
        if copies:
            self.compressed.copy_(self.pinned, non_blocking=True)
        tensors = self.arrays | {"scratch": self.scratch, "statuses": self.statuses}
        at = {name: ctypes.c_void_p(each.data_ptr()) for name, each in tensors.items()}
        self.call(
            "Async", at["from"], at["n_from"], at["n_to"], at["written"],
            ctypes.c_size_t(len(self.sizes)), at["scratch"], ctypes.c_size_t(len(self.scratch)),
            at["to"], Options(), at["statuses"],
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def verify(self):
        self.run(copies=True)
        torch.cuda.synchronize()
        assert not self.statuses.any(), self.statuses.unique()
        output = self.output.cpu().numpy()
        for start, size, chunk in zip(self.ends, self.sizes, self.chunks, strict=False):
            assert output[start : start + size].tobytes() == zlib.decompress(chunk)

    def rate(self, seed, *, copies):
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.run(copies=copies)
        torch.cuda.synchronize()
        return {"GB/s decompressed": sum(self.sizes) / (time.perf_counter() - start) / 1e9}


def cases(options):
    chunks, sizes = chunks_of(plates_of(options)[0], max(options.batches))
    smaller = sum(sizes) / sum(map(len, chunks))
    say(f"{torch.cuda.get_device_name()}; {len(chunks):,} chunks of {np.mean(sizes) / 1024:.0f} "
        f"KiB, {smaller:.1f} times smaller by gzip")  # fmt: skip
    for n in sorted({min(each, len(chunks)) for each in options.batches}):
        batch = OnGpu(chunks[:n], sizes[:n])
        batch.verify()
        ways = {
            "alone": here(batch.rate, copies=False),
            "with copies to the GPU": here(batch.rate, copies=True),
        }
        yield Case(ways, f"{n:,} chunks at a time")


OPTIONS = {"cells": 28_000, "rounds": 5, "batches": [512, 2_048, 8_192]}
