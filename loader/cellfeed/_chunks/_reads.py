"""Chunks to read and the destinations of their elements, processed by several threads."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import bind
from cellfeed._bytes import ByteStore
from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._bringing import (
    Piece,
    ShortRangeError,
    are_brought,
    brought_bytes,
    expect,
    pieces,
)
from cellfeed._chunks._counters import Counter
from cellfeed._chunks._decoder import Decoder, Verify
from cellfeed._chunks._kept import KeptElements, gathered
from cellfeed._chunks._page_cache import seem_to_be_in_memory
from cellfeed._chunks._placing import scratch_bytes
from cellfeed._errors import FormatError

__all__ = ["ChunkReads", "Done"]

_CACHE_BYTES = 1 << 24  # more than this is out of the cache before it is used


class Owner(Protocol):
    """The array of chunks."""

    @property
    def files(self) -> ByteStore:
        """The files or objects of its bytes."""
        ...

    def describe(self, chunk: int) -> str:
        """Return the elements and bytes of a chunk, for a message."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """Counts of completed reads.

    Parameters
    ----------
    n_bytes
        Number of bytes read.
    n_chunks
        Number of chunks decoded.
    n_decompressed
        Number of bytes after decompression.
    ascending
        Whether the column indices of every row ascend strictly.
    """

    n_bytes: int
    n_chunks: int
    n_decompressed: int
    ascending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReads:
    """Tables for `kernels.decode`, which describes their columns.

    Parameters
    ----------
    arrays, chunks, segments
        The tables.
    owners
        The array of each row of ``arrays``.
    crossings
        Addresses at which the column indices of a row continue from another chunk, by itemsize.
    keep_alive
        Objects that must exist while files are read: paths and tables whose addresses are used.
    """

    arrays: NDArray[np.int64]
    chunks: NDArray[np.int64]
    segments: NDArray[np.int64]
    owners: tuple[Owner, ...]
    crossings: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    keep_alive: tuple[object, ...] = ()

    @staticmethod
    def none() -> "ChunkReads":
        """Return no reads."""
        return ChunkReads(
            arrays=np.empty((0, kernels.N_ARRAY_COLUMNS), np.int64),
            chunks=np.empty((0, kernels.N_CHUNK_COLUMNS), np.int64),
            segments=np.empty((0, kernels.N_SEGMENT_COLUMNS), np.int64),
            owners=(),
        )

    @staticmethod
    def concatenate(parts: Sequence["ChunkReads"]) -> "ChunkReads":
        """Return all reads as one, so that threads do not wait for each other in between."""
        parts = [part for part in parts if part.n_chunks]
        if not parts:
            return ChunkReads.none()
        if len(parts) == 1:
            return parts[0]
        chunks = np.concatenate([part.chunks for part in parts])
        n_chunks = [part.n_chunks for part in parts]
        first_arrays = accumulate((len(part.arrays) for part in parts[:-1]), initial=0)
        chunks[:, kernels.ARRAY] += np.repeat(list(first_arrays), n_chunks)
        first_segments = accumulate((len(part.segments) for part in parts[:-1]), initial=0)
        before = np.repeat(list(first_segments), n_chunks)
        chunks[:, kernels.FIRST_SEGMENT] += before
        chunks[:, kernels.END_SEGMENT] += before
        return ChunkReads(
            arrays=np.concatenate([part.arrays for part in parts]),
            chunks=chunks,
            segments=np.concatenate([part.segments for part in parts]),
            crossings={
                itemsize: np.concatenate([part.crossings[itemsize] for part in having])
                for itemsize in (4, 8)
                if (having := [part for part in parts if itemsize in part.crossings])
            },
            owners=tuple(owner for part in parts for owner in part.owners),
            keep_alive=tuple(thing for part in parts for thing in part.keep_alive),
        )

    def without_placing(self) -> "ChunkReads":
        """Return the same reads without placing elements; they can be requested ahead."""
        chunks = self.chunks.copy()
        chunks[:, [kernels.FIRST_SEGMENT, kernels.END_SEGMENT]] = 0
        return replace(self, chunks=chunks, segments=self.segments[:0], crossings={})

    def without_steps(self) -> "ChunkReads":
        """Return the same reads without transforming values."""
        arrays = self.arrays.copy()
        arrays[arrays[:, kernels.PLACING] == kernels.TRANSFORMED, kernels.PLACING] = kernels.COPIED
        return replace(self, arrays=arrays)

    def without_decoding(self) -> "ChunkReads":
        """Return the same reads without decoding the stored bytes."""
        arrays = self.arrays.copy()
        arrays[:, kernels.CODEC] = kernels.STORED
        arrays[:, [kernels.SHUFFLED, kernels.DELTA]] = 0
        return replace(self.without_placing(), arrays=arrays)

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return len(self.chunks)

    @property
    def decoded_bytes(self) -> int:
        """Number of bytes that are decompressed once chunks have been checked."""
        arrays = self.arrays.copy()
        arrays[:, kernels.CHECKED] = kernels.NEVER
        heads = kernels.head_sizes(arrays, self.chunks, self.segments)
        of_chunk = arrays[self.chunks[:, kernels.ARRAY]]
        whole = of_chunk[:, kernels.CODEC] != kernels.STORED
        whole |= (of_chunk[:, [kernels.SHUFFLED, kernels.DELTA]] != 0).any(axis=1)
        # Chunks stored as they are were cut to what is wanted of them.
        return int(np.where(whole, heads, self.chunks[:, kernels.SIZE]).sum())

    @property
    def useful_bytes(self) -> int:
        """Number of these bytes that are placed."""
        n_segments = self.chunks[:, kernels.END_SEGMENT] - self.chunks[:, kernels.FIRST_SEGMENT]
        arrays = np.repeat(self.chunks[:, kernels.ARRAY], n_segments)
        return int(self.segments[:, kernels.COUNT] @ self.arrays[arrays, kernels.ITEMSIZE])

    @property
    def are_brought(self) -> bool:
        """Whether a store reads any of them into memory."""
        return are_brought(self.chunks)

    @property
    def brought_bytes(self) -> int:
        """Number of compressed bytes that stores read; an upper bound for files of one chunk."""
        return brought_bytes(self.chunks)

    def readahead(self) -> list[object]:
        """Announce the reads to the system and the stores, which then run concurrently.

        Returns
        -------
        An object that keeps requests to stores alive; they are cancelled when it is dropped.
        """
        ChunkReads.advise([self])
        return expect(self.chunks, self._stores) if self.are_brought else []

    @staticmethod
    def advise(parts: Sequence["ChunkReads"]) -> None:
        """Announce the reads to the system, which then run concurrently."""
        tables = [part.chunks for part in parts]
        chunks = np.concatenate(tables) if len(tables) > 1 else tables[0]
        if not seem_to_be_in_memory(chunks):
            kernels.advise(chunks, kernels.function_addresses())

    def run(
        self,
        bases: NDArray[np.int64],
        decoder: Decoder | None = None,
    ) -> Done:
        """Read, decode and place everything.

        Parameters
        ----------
        bases
            Base addresses of the destinations; see `cellfeed._buffers._destinations`.
        decoder
            The decoder; the calling thread if None.

        Raises
        ------
        FormatError
            A chunk is damaged or missing; the message names file, element and bytes.
        """
        segments = self.segments.copy()
        segments[:, kernels.TO] = bind(segments[:, kernels.TO], bases)
        report = np.zeros(kernels.N_REPORTS, np.int64)
        report[kernels.ASCENDING] = 1
        n_bytes = self._decode(self.arrays.copy(), segments, report, decoder or Decoder())
        ascending = bool(report[kernels.ASCENDING])
        for itemsize, destinations in self.crossings.items():
            addresses = bind(destinations, bases)
            ascending = ascending and bool(kernels.crossings_ascend(addresses, itemsize))
        return Done(n_bytes, self.n_chunks, int(report[kernels.DECOMPRESSED]), ascending)

    def decompress(self, decoder: Decoder) -> Done:
        """Read and decompress everything, without placing; see `run`."""
        arrays = self.arrays.copy()
        arrays[:, kernels.NOT_PLACED] = 1
        report = np.zeros(kernels.N_REPORTS, np.int64)
        n_bytes = self._decode(arrays, self.segments, report, decoder)
        return Done(n_bytes, self.n_chunks, int(report[kernels.DECOMPRESSED]), ascending=True)

    def select(self, lengths: NDArray[np.int64], decoder: Decoder) -> KeptElements:
        """Read and decode the column indices of rows, and select the elements to keep.

        Parameters
        ----------
        lengths
            Number of stored elements in each row, int64, shape (n_rows,).
        decoder
            The decoder.

        Raises
        ------
        FormatError
            A chunk is damaged or missing; the message names file, element and bytes.
        """
        segments = self.segments.copy()
        # As much as there may be; memory that is not written to is none.
        n_elements, dtype = int(segments[:, kernels.COUNT].sum()), np.dtype(np.int64)
        kept = decoder.pool.acquire(n_elements * dtype.itemsize).array(dtype, n_elements)
        report = np.zeros(kernels.N_REPORTS, np.int64)
        report[kernels.KEPT] = kept.ctypes.data
        self._decode(self.arrays.copy(), segments, report, decoder)
        found = kept[: report[kernels.N_KEPT]]
        return gathered(segments, found, lengths, decoder)

    def _decode(
        self,
        arrays: NDArray[np.int64],
        segments: NDArray[np.int64],
        report: NDArray[np.int64],
        decoder: Decoder,
    ) -> int:
        """Process all chunks, and return how many bytes were read."""
        if not self.n_chunks:
            return 0
        if decoder.verify != "first":
            arrays[:, kernels.CHECKED] = _CHECKED[decoder.verify]
        n_elements = int(segments[:, kernels.COUNT].sum())
        placed = n_elements * int(arrays[:, kernels.OUT_ITEMSIZE].max(initial=0))
        arrays[:, kernels.STREAMED] = placed > _CACHE_BYTES
        n_bytes = 0
        for piece in self._timed_pieces(decoder):
            report[kernels.NEXT_TASK] = 0
            n_bytes += self._work_off(arrays, piece.chunks, segments, report, decoder)
            if report[kernels.FAILURE]:
                chunk = piece.rows[report[kernels.FAILED_CHUNK]]
                raise self._damage(int(report[kernels.FAILURE]), int(chunk))
        decoder.counters.add(Counter.CHUNKS, self.n_chunks)
        decoder.counters.add(Counter.BYTES_READ, n_bytes)
        decoder.counters.add(Counter.BYTES_USED, self.useful_bytes)
        for counter, reported in _REPORTED.items():
            decoder.counters.add(counter, int(report[reported]))
        return n_bytes

    def _work_off(
        self,
        arrays: NDArray[np.int64],
        chunks: NDArray[np.int64],
        segments: NDArray[np.int64],
        report: NDArray[np.int64],
        decoder: Decoder,
    ) -> int:
        """Decode chunks whose bytes are available, and return how many bytes were read."""
        functions = kernels.function_addresses()
        raw = max(int(chunks[:, kernels.SIZE].max(initial=0)), kernels.LARGEST_READ)
        decoded = int(arrays[:, kernels.DECODED_BYTES].max(initial=0))
        unshuffled = decoded if arrays[:, kernels.SHUFFLED].any() else 0
        scratch = scratch_bytes(arrays)

        def work() -> int:
            try:
                buffers = [np.empty(n, np.uint8) for n in (raw, decoded, unshuffled, scratch)]
            except MemoryError:
                report[kernels.FAILED_CHUNK] = _largest(arrays, chunks)
                report[kernels.FAILURE] = kernels.TOO_LARGE
                return 0
            tables = (arrays, chunks, segments)
            return int(kernels.decode(*tables, functions, report, *buffers))

        if decoder.threads is None:
            return work()
        n_tasks = -(-len(chunks) // kernels.CHUNKS_OF_A_TASK)
        jobs = [decoder.threads.submit(work) for _ in range(min(decoder.n_threads, n_tasks))]
        try:
            return sum(job.result() for job in jobs)
        except BaseException:
            # The other threads write into memory that the caller is about to let go.
            report[kernels.FAILURE] = kernels.STOPPED
            wait(jobs)
            raise

    def _timed_pieces(self, decoder: Decoder) -> Iterator[Piece]:
        """Yield chunks as their bytes become available; all threads wait for those of a store."""
        if not self.are_brought:
            yield from self._pieces()
            return
        begin = time.perf_counter_ns()
        for piece in self._pieces():
            waited = time.perf_counter_ns() - begin
            decoder.counters.add(Counter.READING, waited * decoder.n_threads)
            yield piece
            begin = time.perf_counter_ns()

    def _pieces(self) -> Iterator[Piece]:
        """Yield chunks as their bytes become available."""
        try:
            yield from pieces(self.chunks, self._stores, self.arrays[:, kernels.DECODED_BYTES])
        except ShortRangeError as short:
            raise self._damage(short.failure, short.chunk) from None

    @property
    def _stores(self) -> list[ByteStore]:
        """The byte store of each array."""
        return [owner.files for owner in self.owners]

    def _damage(self, failure: int, chunk: int) -> FormatError:
        owner = self.owners[self.chunks[chunk, kernels.ARRAY]]
        where = owner.describe(int(self.chunks[chunk, kernels.NUMBER]))
        own = getattr(owner, "bad_index", "") if failure == kernels.BAD_INDEX else ""
        return FormatError(f"{where}: {own or _FAILURES[failure]}")


def _largest(arrays: NDArray[np.int64], chunks: NDArray[np.int64]) -> int:
    """Return the chunk that takes the most memory."""
    decoded = arrays[chunks[:, kernels.ARRAY], kernels.DECODED_BYTES]
    return int(np.maximum(chunks[:, kernels.SIZE], decoded).argmax())


_REPORTED = {
    Counter.BYTES_DECOMPRESSED: kernels.DECOMPRESSED,
    Counter.READING: kernels.READING,
    Counter.DECOMPRESSING: kernels.DECOMPRESSING,
    Counter.PLACING: kernels.PLACING_ELEMENTS,
}

_CHECKED: dict[Verify, int] = {"always": kernels.EVERY_TIME, "never": kernels.NEVER}

_FAILURES = {
    kernels.UNREADABLE: (
        "cannot be read; check the disk and where a link leads, and copy the file again"
    ),
    kernels.TRUNCATED: "are beyond the end of the file; copy or download it again",
    kernels.UNDECODABLE: "cannot be decompressed; the file is damaged, copy or download it again",
    kernels.WRONG_SIZE: (
        "decompress to another size than that of the chunk; the file is damaged, copy or "
        "download it again"
    ),
    kernels.BAD_INDEX: (
        "have a column index outside of the matrix; the file is damaged, copy or download it again"
    ),
    kernels.TOO_LARGE: "need more memory to decompress than is free; write them in smaller chunks",
    kernels.MISSING: (
        "are missing; copy or download it again or, if these are zeros that were "
        "never written, write them too"
    ),
}
