"""Decompression of the chunks of a .h5ad file on a GPU, by nvCOMP.

    python -m bench.gpu.inflate FILE.h5ad [--rounds 5] [--batches 512 2048 8192]

Needs a GPU, and ``nvidia-libnvcomp-cu13`` (or ``-cu12``). Chunks of ``X/data`` and ``X/indices``,
compressed by gzip, are decompressed many at a time, as many as a fetch needs. All bytes are
compared with those of zlib once.
"""

import argparse
import ctypes
import time
import zlib
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import torch
from bench._turns import say, spread

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
        starts, ends = starts_of([len(each) for each in bare]), starts_of(sizes)
        self.pinned = torch.zeros(int(starts[-1]), dtype=torch.uint8).pin_memory()
        for start, each in zip(starts, bare, strict=False):
            self.pinned[start : start + len(each)] = torch.frombuffer(
                bytearray(each), dtype=torch.uint8
            )
        self.compressed = self.pinned.cuda()
        self.output = torch.zeros(int(ends[-1]), dtype=torch.uint8, device="cuda")
        self.ends = ends
        on_gpu = {
            "from": self.compressed.data_ptr() + starts[:-1],
            "n_from": [len(each) for each in bare],
            "to": self.output.data_ptr() + ends[:-1],
            "n_to": sizes,
            "written": np.zeros(len(sizes)),
        }
        self.arrays = {
            name: torch.from_numpy(np.asarray(each, np.int64)).cuda()
            for name, each in on_gpu.items()
        }
        self.statuses = torch.full((len(sizes),), -1, dtype=torch.int32, device="cuda")
        n_bytes = ctypes.c_size_t()
        self.check(
            self.nvcomp.nvcompBatchedDeflateDecompressGetTempSize(
                *map(ctypes.c_size_t, (len(sizes), max(sizes))),
                Options(),
                ctypes.byref(n_bytes),
                ctypes.c_size_t(sum(sizes)),
                None,
            )
        )
        self.scratch = torch.empty(max(1, n_bytes.value), dtype=torch.uint8, device="cuda")

    def check(self, status):
        assert status == 0, f"nvCOMP: status {status}"

    def pointer(self, tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def run(self, *, copies):
        """Decompress; first copy from pinned memory if `copies`."""
        if copies:
            self.compressed.copy_(self.pinned, non_blocking=True)
        arrays = {name: self.pointer(each) for name, each in self.arrays.items()}
        self.check(
            self.nvcomp.nvcompBatchedDeflateDecompressAsync(
                arrays["from"],
                arrays["n_from"],
                arrays["n_to"],
                arrays["written"],
                ctypes.c_size_t(len(self.sizes)),
                self.pointer(self.scratch),
                ctypes.c_size_t(len(self.scratch)),
                arrays["to"],
                Options(),
                self.pointer(self.statuses),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
        )

    def verify(self):
        self.run(copies=True)
        torch.cuda.synchronize()
        assert not self.statuses.any(), self.statuses.unique()
        output = self.output.cpu().numpy()
        for start, size, chunk in zip(self.ends, self.sizes, self.chunks, strict=False):
            assert output[start : start + size].tobytes() == zlib.decompress(chunk)


def seconds(function):
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 2_048, 8_192])
    options = parser.parse_args(arguments)
    chunks, sizes = chunks_of(options.file, max(options.batches))
    smaller = sum(sizes) / sum(map(len, chunks))
    say(
        f"{torch.cuda.get_device_name()}; {len(chunks):,} chunks of {np.mean(sizes) / 1024:.0f} KiB"
        f", {smaller:.1f} times smaller by gzip"
    )
    say("| chunks at a time | GB/s decompressed | with the copies to the GPU |")
    say("| --- | --- | --- |")
    for n in sorted({min(each, len(chunks)) for each in options.batches}):
        batch = OnGpu(chunks[:n], sizes[:n])
        batch.verify()
        found = {False: [], True: []}
        for _ in range(options.rounds):
            for copies, rates in found.items():
                took = seconds(lambda batch=batch, copies=copies: batch.run(copies=copies))
                rates.append(sum(sizes[:n]) / took / 1e9)
        say(f"| {n:,} | " + " | ".join(spread(each, ".2f") for each in found.values()) + " |")


if __name__ == "__main__":
    main()
