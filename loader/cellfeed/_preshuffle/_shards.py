"""An array of sparse rows as shards of chunks, which threads encode concurrently."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc
from numpy.typing import NDArray
from zarr.codecs import BloscCodec
from zarr.codecs.numcodecs import AsType, Delta

from cellfeed._preshuffle._lz4 import compress

__all__ = ["Encoding", "counts_encoding", "plain_encoding", "sums_encoding", "write_array"]

Elements = Callable[[int, int], NDArray[Any]]

_ABSENT = np.iinfo(np.uint64).max
_ELEMENTS_OF_A_JOB = 1 << 18  # what a thread holds of them stays in its cache, or nearly
_LEAST_COMPRESSED_HERE = 1 << 14  # elements; of fewer LZ4HC makes less
_SHUFFLES: dict[Literal["shuffle", "bitshuffle"], int] = {
    "shuffle": blosc.SHUFFLE,
    "bitshuffle": blosc.BITSHUFFLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The encoding of chunks of elements: filters of numcodecs, and blosc.

    Parameters
    ----------
    dtype
        Dtype of the array.
    stored
        Dtype to which elements are narrowed, which can hold all of them.
    delta
        Whether each element of a chunk is stored as its difference from the previous one.
    compressor, level, shuffle
        Parameters of blosc.
    """

    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    delta: bool
    compressor: Literal["lz4", "lz4hc"]
    level: int
    shuffle: Literal["shuffle", "bitshuffle"] = "shuffle"

    @property
    def filters(self) -> list[Any]:
        """The filters that zarr decodes after blosc."""
        filters: list[Any] = []
        if self.stored != self.dtype:
            filters.append(AsType(encode_dtype=self.stored.str, decode_dtype=self.dtype.str))
        if self.delta:
            filters.append(Delta(dtype=self.stored.str))
        return filters

    @property
    def blosc(self) -> BloscCodec:
        """The blosc codec, which zarr decodes first."""
        return BloscCodec(
            cname=self.compressor,
            clevel=self.level,
            shuffle=self.shuffle,
            typesize=self.stored.itemsize,
        )

    def encode(self, elements: NDArray[Any], chunk: int) -> list[bytes]:
        """Return the encoded chunks of elements; the last chunk is filled with zeros."""
        n_chunks = -(-elements.size // chunk)
        stored = np.zeros((n_chunks, chunk), self.stored)
        stored.reshape(-1)[: elements.size] = elements
        if self.delta:
            stored[:, 1:] -= stored[:, :-1].copy()
        if self.compressor == "lz4hc" and self._is_compressed_here(chunk):
            return compress(stored)
        name = self.compressor.encode()
        return [blosc.compress(row, name, self.level, _SHUFFLES[self.shuffle]) for row in stored]

    def _is_compressed_here(self, chunk: int) -> bool:
        """Return whether our compressor takes a third of LZ4HC's time, for at most its size."""
        return self.stored.str in ("|u1", "<u2") and chunk >= _LEAST_COMPRESSED_HERE


def plain_encoding(dtype: np.dtype[Any]) -> Encoding:
    """Return annbatch's encoding: about as small as gzip 1, and several times as fast."""
    return Encoding(dtype=dtype, stored=dtype, delta=False, compressor="lz4", level=3)


def sums_encoding(dtype: np.dtype[Any]) -> Encoding:
    """Return the encoding of ascending column indices; see ``docs/explanation/codecs.md``."""
    return Encoding(dtype=dtype, stored=dtype, delta=True, compressor="lz4", level=5)


def counts_encoding(dtype: np.dtype[Any], stored: np.dtype[Any]) -> Encoding:
    """Return the encoding of repetitive counts; see ``docs/explanation/codecs.md``."""
    return Encoding(dtype=dtype, stored=stored, delta=False, compressor="lz4hc", level=7)


def write_array(
    group: zarr.Group,
    folder: Path,
    name: str,
    encoding: Encoding,
    elements: Elements,
    n_elements: int,
    *,
    chunk: int,
    chunks_per_shard: int,
    threads: Executor,
    on_written: Callable[[int], object],
) -> None:
    """Write a one-dimensional array.

    Parameters
    ----------
    group, folder
        The group of the array, and its folder.
    name, encoding
        Name and encoding of the array.
    elements
        Returns elements ``[start, stop)``; called by threads.
    n_elements
        Number of elements.
    chunk, chunks_per_shard
        Number of elements in a chunk, and of chunks in a shard.
    threads
        Threads that encode.
    on_written
        Called with the number of elements that have been written.
    """
    chunk = max(1, min(chunk, n_elements))
    shard = chunk * min(chunks_per_shard, max(1, -(-n_elements // chunk)))
    group.create_array(
        name,
        shape=(n_elements,),
        dtype=encoding.dtype,
        chunks=(chunk,),
        shards=(shard,),
        filters=encoding.filters,
        compressors=encoding.blosc,
    )
    step = chunk * max(1, _ELEMENTS_OF_A_JOB // chunk)

    def encoded(first: int, stop: int) -> list[bytes]:
        return encoding.encode(elements(first, stop), chunk)

    for number, start in enumerate(range(0, n_elements, shard)):
        end = min(start + shard, n_elements)
        jobs = [
            threads.submit(encoded, first, min(first + step, end))
            for first in range(start, end, step)
        ]
        path = folder / name / "c" / str(number)
        path.parent.mkdir(exist_ok=True)
        _write_shard(path, (each for job in jobs for each in job.result()), shard // chunk)
        on_written(end)


def _write_shard(path: Path, chunks: Iterator[bytes], n_chunks: int) -> None:
    """Write chunks one after another, and the index of their positions."""
    index = np.full((n_chunks, 2), _ABSENT, "<u8")
    filled = 0
    with path.open("wb") as file:
        for k, chunk in enumerate(chunks):
            index[k] = filled, len(chunk)
            filled += file.write(chunk)
        file.write(index.tobytes())
        file.write(google_crc32c.value(index.tobytes()).to_bytes(4, "little"))
