"""Chunks to read and the destinations of their elements, processed by several threads."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed.bytes import LOOK_UP_SECONDS, ByteStore, is_cancelled
from cellfeed.bytes._buffers import bind
from cellfeed.decode import _kernels as kernels
from cellfeed.decode._decoder import Counter, Decoder, Verify
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._codecs import BLOSC, STORED, function_addresses
from cellfeed.decode._placing import SelectedElements, ValueSteps, scratch_bytes

# Reading the bytes of chunks into memory, if compiled threads do not read them themselves.

_Requested = tuple[ByteStore, NDArray[np.intp], object]
"""A store, chunks whose bytes it returns together, and the owner of their requests."""

_Damage = Callable[[int, int], FormatError]
"""The error for a failure, a code of the kernels, and the chunk that fails."""

Arrived = tuple[NDArray[np.intp], NDArray[np.int64], Sequence[object]]


def chunks_as_they_arrive(
    chunks: NDArray[np.int64],
    stores: Sequence[ByteStore],
    decoded_bytes: NDArray[np.int64],
    damage: _Damage,
) -> Iterator[Arrived]:
    """Yield all chunks, each as soon as it can be decoded without waiting.

    Chunks that threads read themselves come first, chunks of stores as they arrive.

    Parameters
    ----------
    chunks
        A table of the kernels. Chunks with the flag `IN_MEMORY` have the number of their file in
        place of a descriptor.
    stores
        The byte store of each array.
    decoded_bytes
        Decompressed size of a chunk of each array in bytes, int64.
    damage
        Returns the error for an incomplete chunk.

    Yields
    ------
    Row numbers in the table, shape (n,); these rows, with addresses in place of offsets for chunks
    in memory; and objects that own this memory.

    Raises
    ------
    FormatError
        A file ends before the end of a chunk, or has the wrong size.
    """
    is_requested = are_requested(chunks)
    if not is_requested.any():
        yield np.arange(len(chunks)), chunks, ()
        return
    pending, later = dict[Future[None], list[_Requested]](), list[_Requested]()
    for store, rows in _by_store(chunks, stores):
        _check_own_files(chunks, rows, store, decoded_bytes, damage)
        arrivals = store.arrivals(*_ranges(chunks, rows))
        if arrivals is None:
            later.append((store, rows, None))
        else:
            for each in arrivals:
                together = pending.setdefault(each.is_here, [])
                together.append((store, rows[each.ranges], each.owner))
    at_hand = np.flatnonzero(~is_requested)
    if at_hand.size:
        yield at_hand, chunks[at_hand], ()
    if later:
        yield _read(chunks, later, damage)
    while pending:
        arrived = wait(pending, LOOK_UP_SECONDS, FIRST_COMPLETED).done
        if not arrived and is_cancelled():
            arrived = set(pending)  # the store raises the error
        if arrived:
            yield _read(chunks, [own for each in arrived for own in pending.pop(each)], damage)


def are_requested(chunks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which chunks have bytes that a store reads into memory."""
    flags = chunks[:, fields.FLAGS]
    others = fields.AT_HAND | fields.ABSENT | fields.LOST
    are_requested: NDArray[np.bool_] = flags & (fields.IN_MEMORY | others) == fields.IN_MEMORY
    return are_requested


def _by_store(
    chunks: NDArray[np.int64], stores: Sequence[ByteStore]
) -> Iterator[tuple[ByteStore, NDArray[np.intp]]]:
    """Iterate over stores and their chunks, all of one store together."""
    distinct = {id(store): store for store in stores}
    numbers = {each: number for number, each in enumerate(distinct)}
    number_of_array = np.array([numbers[id(store)] for store in stores], np.intp)
    requested = np.flatnonzero(are_requested(chunks))
    number_of_chunk = number_of_array[chunks[requested, fields.ARRAY]]
    for number, store in enumerate(distinct.values()):
        rows = requested[number_of_chunk == number]
        if rows.size:
            yield store, rows


def _ranges(
    chunks: NDArray[np.int64], rows: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return file, first byte and size of each chunk."""
    table = np.ascontiguousarray(chunks[rows][:, [fields.FD, fields.OFFSET, fields.SIZE]].T)
    return table[0], table[1], table[2]


def _read(chunks: NDArray[np.int64], arrived: Sequence[_Requested], damage: _Damage) -> Arrived:
    """Return chunks whose bytes have arrived, with the addresses of the bytes."""
    rows = np.concatenate([own for _, own, _ in arrived])
    found, owners = chunks[rows], list[object]()
    contents = (
        content for store, own, _ in arrived for content in store.read_ranges(*_ranges(chunks, own))
    )
    for chunk, row, content in zip(found, rows.tolist(), contents, strict=True):
        if content is None:
            chunk[fields.FLAGS] |= fields.LOST
            continue
        stored, expected = np.frombuffer(content, np.uint8), int(chunk[fields.SIZE])
        if stored.size > expected:
            raise ValueError(f"{stored.size} bytes were read, but {expected} expected")
        if stored.size < expected and not chunk[fields.FLAGS] & fields.WHOLE_FILE:
            raise damage(fields.TRUNCATED, row)
        owners.append(stored)
        chunk[fields.OFFSET], chunk[fields.SIZE] = stored.ctypes.data, stored.size
    return rows, found, owners


def _check_own_files(
    chunks: NDArray[np.int64],
    rows: NDArray[np.intp],
    store: ByteStore,
    decoded_bytes: NDArray[np.int64],
    damage: _Damage,
) -> None:
    """Check that files that contain one uncompressed chunk have its size."""
    alone = rows[(chunks[rows, fields.FLAGS] & fields.OWN_FILE) != 0]
    sizes = store.sizes(np.ascontiguousarray(chunks[alone, fields.FD]))
    wrong = alone[(sizes >= 0) & (sizes != decoded_bytes[chunks[alone, fields.ARRAY]])]
    if wrong.size:
        raise damage(fields.WRONG_SIZE, int(wrong[0]))


# Reads of chunks.

_CACHE_BYTES = 1 << 24  # more than this is out of the cache before it is used


def chunk_table(
    store: ByteStore,
    files: NDArray[np.int64],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    firsts: NDArray[np.int64],
    n_segments: int,
    flags: NDArray[np.int64] | int = 0,
) -> tuple[NDArray[np.int64], object]:
    """Return the kernels' table of chunks, and an object that must exist while they are read.

    Parameters
    ----------
    store
        The files.
    files, offsets, sizes
        Where each chunk lies.
    firsts, n_segments
        First segment of each chunk, ascending, and the number of all segments.
    flags
        Flags of each chunk; see `Located`.
    """
    table = np.zeros((len(offsets), fields.N_CHUNK_COLUMNS), np.int64)
    handles, in_memory, address = store.handles(files), 0, 0
    if handles is None:  # the store reads bytes into memory before they are decoded
        handles, in_memory = (files, store.memory), fields.IN_MEMORY
    if store.memory is not None:
        in_memory, address = fields.IN_MEMORY | fields.AT_HAND, store.memory.ctypes.data
    table[:, fields.FD], keep_alive = handles
    table[:, fields.OFFSET] = offsets + address
    table[:, fields.SIZE] = sizes
    table[:, fields.FLAGS] = flags | in_memory
    table[:, fields.FIRST_SEGMENT] = firsts
    table[:-1, fields.END_SEGMENT] = firsts[1:]
    table[-1:, fields.END_SEGMENT] = n_segments
    return table, keep_alive


class Owner(Protocol):
    """The array of chunks."""

    @property
    def files(self) -> ByteStore:
        """The files or objects of its bytes."""
        ...

    def describe(self, chunk: int) -> str:
        """Return the elements and bytes of a chunk, for a message."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReads:
    """Tables for `kernels.decode`; `_kernels/_fields.py` names their columns.

    Parameters
    ----------
    arrays, chunks, segments
        The tables.
    owners
        The array of each row of ``arrays``.
    crossings
        Destinations at which the column indices of a row continue from another chunk, int64.
    files
        Numbers of the files of chunks, int64, with their stores.
    keep_alive
        Objects that must exist while chunks are decoded: open files, and tables whose addresses are
        used.
    are_whole
        Whether each segment is a row that is not selected from or spread.
    """

    arrays: NDArray[np.int64]
    chunks: NDArray[np.int64]
    segments: NDArray[np.int64]
    owners: tuple[Owner, ...]
    crossings: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    files: tuple[tuple[ByteStore, NDArray[np.int64]], ...] = ()
    keep_alive: tuple[object, ...] = ()
    are_whole: bool = False

    @staticmethod
    def none() -> "ChunkReads":
        """Return no reads."""
        return ChunkReads(
            arrays=np.empty((0, fields.N_ARRAY_COLUMNS), np.int64),
            chunks=np.empty((0, fields.N_CHUNK_COLUMNS), np.int64),
            segments=np.empty((0, fields.N_SEGMENT_COLUMNS), np.int64),
            owners=(),
        )

    @staticmethod
    def concatenate(parts: Sequence["ChunkReads"]) -> "ChunkReads":
        """Return all reads as one, so that threads do not wait for each other in between.

        Chunks that several parts read for the same rows are read and decoded once.
        """
        parts = _joined([part for part in parts if part.n_chunks])
        if not parts:
            return ChunkReads.none()
        if len(parts) == 1:
            return parts[0]
        chunks = np.concatenate([part.chunks for part in parts])
        n_chunks = [part.n_chunks for part in parts]
        first_arrays = accumulate((len(part.arrays) for part in parts[:-1]), initial=0)
        chunks[:, fields.ARRAY] += np.repeat(list(first_arrays), n_chunks)
        first_segments = accumulate((len(part.segments) for part in parts[:-1]), initial=0)
        before = np.repeat(list(first_segments), n_chunks)
        chunks[:, fields.FIRST_SEGMENT] += before
        chunks[:, fields.END_SEGMENT] += before
        return ChunkReads(
            arrays=np.concatenate([part.arrays for part in parts]),
            chunks=chunks,
            segments=np.concatenate([part.segments for part in parts]),
            crossings=np.concatenate([part.crossings for part in parts]),
            owners=tuple(owner for part in parts for owner in part.owners),
            files=tuple(some for part in parts for some in part.files),
            keep_alive=tuple(thing for part in parts for thing in part.keep_alive),
        )

    def without_placing(self) -> "ChunkReads":
        """Return the same reads without placing elements; so that they can be prefetched."""
        chunks = self.chunks.copy()
        chunks[:, [fields.FIRST_SEGMENT, fields.END_SEGMENT]] = 0
        return replace(
            self, chunks=chunks, segments=self.segments[:0], crossings=self.crossings[:0]
        )

    def with_steps(self, steps: ValueSteps | None) -> "ChunkReads":
        """Return the same reads with transforms of all values, or without any; see `are_whole`."""
        arrays, address = self.arrays.copy(), 0 if steps is None else steps.table.ctypes.data
        arrays[arrays[:, fields.INDEX_LIMIT] < 0, fields.STEPS] = address
        return replace(self, arrays=arrays)

    def without_decoding(self) -> "ChunkReads":
        """Return the same reads without decoding the stored bytes."""
        arrays = self.arrays.copy()
        arrays[:, fields.CODEC] = STORED
        arrays[:, [fields.SHUFFLED, fields.DELTA]] = 0
        return replace(self.without_placing(), arrays=arrays)

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return len(self.chunks)

    @property
    def decoded_bytes(self) -> int:
        """Number of bytes that are decompressed once chunks have been checked."""
        arrays = self.arrays.copy()
        arrays[:, fields.CHECKED] = fields.NEVER
        heads = kernels.head_sizes(arrays, self.chunks, self.segments)
        of_chunk = arrays[self.chunks[:, fields.ARRAY]]
        whole = of_chunk[:, fields.CODEC] != STORED
        whole |= (of_chunk[:, [fields.SHUFFLED, fields.DELTA]] != 0).any(axis=1)
        # Chunks stored as they are were cut to what is wanted of them.
        return int(np.where(whole, heads, self.chunks[:, fields.SIZE]).sum())

    @property
    def useful_bytes(self) -> int:
        """Number of these bytes that are placed."""
        n_segments = self.chunks[:, fields.END_SEGMENT] - self.chunks[:, fields.FIRST_SEGMENT]
        arrays = np.repeat(self.chunks[:, fields.ARRAY], n_segments)
        return int(self.segments[:, fields.COUNT] @ self.arrays[arrays, fields.ITEMSIZE])

    @property
    def are_requested(self) -> bool:
        """Whether a store reads any of them into memory, such as those of a server."""
        return bool(are_requested(self.chunks).any())

    @property
    def requested_bytes(self) -> int:
        """Number of compressed bytes that stores read; an upper bound for files of one chunk."""
        return int(self.chunks[:, fields.SIZE][are_requested(self.chunks)].sum())

    def readahead(self) -> list[object]:
        """Announce the reads to the system and the stores, which then run concurrently.

        Returns
        -------
        An object that keeps requests to stores alive; they are cancelled when it is dropped.
        """
        kernels.advise(self.chunks, function_addresses())
        chunks, stores = self.chunks, self._stores
        begun = [store.expect(*_ranges(chunks, rows)) for store, rows in _by_store(chunks, stores)]
        return [each for each in begun if each is not None]

    def run(self, bases: NDArray[np.int64], decoder: Decoder | None = None) -> bool:
        """Read, decode and place everything.

        Parameters
        ----------
        bases
            Base addresses of the destinations; see `cellfeed.bytes._buffers`.
        decoder
            The decoder; the calling thread if None.

        Returns
        -------
        Whether the column indices of every row ascend strictly.

        Raises
        ------
        FormatError
            A chunk is damaged or missing; the message names file, element and bytes.
        """
        segments = self.segments.copy()
        segments[:, fields.TO] = bind(segments[:, fields.TO], bases)
        report = self._decode(self.arrays.copy(), segments, decoder or Decoder())
        ascending = bool(report[fields.ASCENDING])
        if self.crossings.size:
            ascending &= bool(kernels.crossings_ascend(bind(self.crossings, bases)))
        return ascending

    def decompress(self, decoder: Decoder) -> None:
        """Read and decompress everything, without placing; see `run`."""
        arrays = self.arrays.copy()
        arrays[:, fields.NOT_PLACED] = 1
        self._decode(arrays, self.segments, decoder)

    def select(self, lengths: NDArray[np.int64], decoder: Decoder) -> SelectedElements:
        """Read and decode the column indices of rows, and select elements by column.

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
        # Enough for all elements; pages that are not written to take no memory.
        n_elements, dtype = int(segments[:, fields.COUNT].sum()), np.dtype(np.int64)
        found = decoder.pool.acquire(n_elements * dtype.itemsize).array(dtype, n_elements)
        report = self._decode(self.arrays.copy(), segments, decoder, found.ctypes.data)
        found = found[: report[fields.N_SELECTED]]
        row_firsts = np.flatnonzero(segments[:, fields.WITHIN] == 0)
        n_segments = np.diff(row_firsts, append=len(segments))
        rows = np.repeat(np.flatnonzero(lengths), n_segments)
        counts = np.bincount(rows, segments[:, fields.COUNT], minlength=lengths.size)
        starts = np.concatenate([[0], np.cumsum(counts.astype(np.int64))])
        memory = decoder.pool.acquire(8 * found.size)
        columns = memory.array(np.dtype(np.int32), found.size)
        positions = memory.array(np.dtype(np.int32), found.size, start=columns.nbytes)

        def gather(bounds: tuple[int, int]) -> bool:
            own = slice(*bounds)
            return bool(kernels.gather(segments[own], rows[own], starts, found, columns, positions))

        shares = np.linspace(0, row_firsts.size, decoder.num_threads, endpoint=False).astype(int)
        begins = np.unique(row_firsts[shares]).tolist() if row_firsts.size else []
        in_turn = map if decoder.threads is None else decoder.threads.map
        ascending = all([*in_turn(gather, pairwise([*begins, len(segments)]))])
        return SelectedElements(starts, columns, positions, ascending)

    def _decode(
        self,
        arrays: NDArray[np.int64],
        segments: NDArray[np.int64],
        decoder: Decoder,
        selected: int = 0,
    ) -> NDArray[np.int64]:
        """Process all chunks, and return the report of the kernels.

        Selected elements are listed at the address ``selected``.
        """
        report = np.zeros(fields.N_REPORTS, np.int64)
        report[fields.ASCENDING], report[fields.SELECTION] = 1, selected
        if not self.n_chunks:
            return report
        if decoder.verify != "first":
            arrays[:, fields.CHECKED] = _CHECKED[decoder.verify]
        kernels.resolve(arrays)  # here, since threads would do it in turn, each with the GIL
        n_elements = int(segments[:, fields.COUNT].sum())
        placed = n_elements * int(arrays[:, fields.OUT_ITEMSIZE].max(initial=0))
        arrays[:, fields.STREAMED] = placed > _CACHE_BYTES
        n_bytes, counters = 0, decoder.counters
        decoded_bytes = self.arrays[:, fields.DECODED_BYTES]
        arrivals = chunks_as_they_arrive(self.chunks, self._stores, decoded_bytes, self._damage)
        begin = time.perf_counter_ns()
        for rows, chunks, _owners in arrivals:
            if self.are_requested:  # all threads have waited for the bytes of a store
                waited = time.perf_counter_ns() - begin
                counters.add(Counter.READING, waited * decoder.num_threads)
            report[fields.NEXT_TASK] = 0
            n_bytes += self._decode_ready(arrays, chunks, segments, report, decoder)
            if report[fields.FAILURE]:
                self._check_files()  # else this would be called damage
                chunk, failure = divmod(int(report[fields.FAILURE]), fields.PER_CHUNK)
                raise self._damage(failure, int(rows[chunk]))
            begin = time.perf_counter_ns()
        self._check_files()
        counters.add(Counter.CHUNKS, self.n_chunks)
        counters.add(Counter.BYTES_READ, n_bytes)
        counters.add(Counter.BYTES_USED, self.useful_bytes)
        for counter, reported in _REPORTED.items():
            counters.add(counter, int(report[reported]))
        return report

    def _decode_ready(
        self,
        arrays: NDArray[np.int64],
        chunks: NDArray[np.int64],
        segments: NDArray[np.int64],
        report: NDArray[np.int64],
        decoder: Decoder,
    ) -> int:
        """Decode chunks whose bytes are available, and return how many bytes were read."""
        functions = function_addresses()
        raw = max(int(chunks[:, fields.SIZE].max(initial=0)), fields.LARGEST_READ)
        decoded = int(arrays[:, fields.DECODED_BYTES].max(initial=0))
        are_shuffled = arrays[:, fields.SHUFFLED] | (arrays[:, fields.CODEC] == BLOSC)
        unshuffled = decoded if are_shuffled.any() else 0
        scratch = scratch_bytes(arrays, segments)

        def work() -> int:
            try:
                buffers = [np.empty(n, np.uint8) for n in (raw, decoded, unshuffled, scratch)]
            except MemoryError:
                of_chunks = arrays[chunks[:, fields.ARRAY], fields.DECODED_BYTES]
                largest = int(np.maximum(chunks[:, fields.SIZE], of_chunks).argmax())
                report[fields.FAILURE] = largest * fields.PER_CHUNK + fields.TOO_LARGE
                return 0
            tables = (arrays, chunks, segments)
            return int(kernels.decode(*tables, functions, report, *buffers))

        if decoder.threads is None:
            return work()
        n_tasks = -(-len(chunks) // fields.CHUNKS_OF_A_TASK)
        jobs = [decoder.threads.submit(work) for _ in range(min(decoder.num_threads, n_tasks))]
        try:
            return sum(job.result() for job in jobs)
        except BaseException:
            # The other threads write into memory that the caller is about to release.
            report[fields.FAILURE] = fields.STOPPED
            wait(jobs)
            raise

    def _check_files(self) -> None:
        """Check that no file has changed while it was read."""
        for store, files in self.files:
            store.check_files(files)

    @property
    def _stores(self) -> list[ByteStore]:
        """The byte store of each array."""
        return [owner.files for owner in self.owners]

    def _damage(self, failure: int, chunk: int) -> FormatError:
        owner = self.owners[self.chunks[chunk, fields.ARRAY]]
        where = owner.describe(int(self.chunks[chunk, fields.NUMBER]))
        own = getattr(owner, "bad_index", "") if failure == fields.BAD_INDEX else ""
        return FormatError(f"{where}: {own or _FAILURES[failure]}")


def _joined(parts: Sequence[ChunkReads]) -> list[ChunkReads]:
    """Return the same reads, but those of the same elements as one: decoded once, placed for each.

    Elements that share their column indices read the same chunks of one array.
    """
    alike = list[list[ChunkReads]]()
    of_array = dict[int, list[list[ChunkReads]]]()
    for part in parts:
        known = of_array.setdefault(id(part.owners[0]), [])
        for some in known:
            if _read_the_same(some[0], part):
                some.append(part)
                break
        else:
            known.append([part])
            alike.append(known[-1])
    return [some[0] if len(some) == 1 else _placed_for_each(some) for some in alike]


def _read_the_same(one: ChunkReads, other: ChunkReads) -> bool:
    """Return whether two reads differ only in destinations, and in handles of files."""
    return (
        np.array_equal(one.arrays, other.arrays)
        and np.array_equal(one.chunks[:, fields.OFFSET :], other.chunks[:, fields.OFFSET :])
        and one.segments.shape == other.segments.shape
        and np.array_equal(
            one.segments[:, [fields.FROM, fields.COUNT]],
            other.segments[:, [fields.FROM, fields.COUNT]],
        )
    )


def _placed_for_each(alike: Sequence[ChunkReads]) -> ChunkReads:
    first, chunks = alike[0], alike[0].chunks.copy()
    chunks[:, [fields.FIRST_SEGMENT, fields.END_SEGMENT]] *= len(alike)
    segments = np.stack([each.segments for each in alike], axis=1)
    return replace(
        first,
        chunks=chunks,
        segments=segments.reshape(-1, fields.N_SEGMENT_COLUMNS),
        crossings=np.concatenate([each.crossings for each in alike]),
        files=tuple(some for each in alike for some in each.files),
        keep_alive=tuple(thing for each in alike for thing in each.keep_alive),
    )


_REPORTED = {
    Counter.BYTES_DECOMPRESSED: fields.DECOMPRESSED,
    Counter.READING: fields.READING,
    Counter.DECOMPRESSING: fields.DECOMPRESSING,
    Counter.PLACING: fields.PLACING_ELEMENTS,
}

_CHECKED: dict[Verify, int] = {"always": fields.EVERY_TIME, "never": fields.NEVER}

_FAILURES = {
    fields.UNREADABLE: (
        "cannot be read; check the disk and where a link leads, and copy the file again"
    ),
    fields.TRUNCATED: "are beyond the end of the file; copy or download it again",
    fields.UNDECODABLE: "cannot be decompressed; the file is damaged, copy or download it again",
    fields.WRONG_SIZE: (
        "decompress to another size than that of the chunk; the file is damaged, copy or "
        "download it again"
    ),
    fields.WRONG_CHECKSUM: (
        "do not match their checksum; the file is damaged, copy or download it again"
    ),
    fields.BAD_INDEX: (
        "have a column index outside of the matrix; the file is damaged, copy or download it again"
    ),
    fields.TOO_LARGE: "need more memory to decompress than is free; write them in smaller chunks",
    fields.MISSING: (
        "are missing; copy or download it again or, if these are zeros that were "
        "never written, write them too"
    ),
}
