"""Rows that libraries read: sparse rows decoded in our threads, and dense rows made sparse."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes._buffers import array_at, destination
from cellfeed.decode import ChunkReads, Counter, Decoder, can_cast
from cellfeed.fetch._parts import Part
from cellfeed.rows import CsrRows, DenseChunks, RowTarget
from cellfeed.sources._source import DirectCsr

_ROWS_OF_A_JOB = 256  # enough to make little of a job's own time
_ROWS_COPIED = 32  # few enough to stay in the cache
_FEW = 8  # rows that lie together, below which they are decoded elsewhere, and copied


@dataclass(frozen=True, slots=True)
class LibraryRows:
    """Sparse rows with all columns, which a library decodes to their destinations.

    Parameters
    ----------
    part, stored
        The part, and the element of its source.
    target
        Destinations of the rows.
    """

    part: Part
    stored: DirectCsr
    target: RowTarget

    @property
    def announced(self) -> ChunkReads:
        """The byte ranges of the rows in storage."""
        with self.part.source.reading:
            return self.stored.stored_rows(self.part.rows)

    def jobs(self, bases: NDArray[np.int64]) -> "Iterator[_Job]":
        """Yield the decoding jobs, bound to memory whose groups begin at ``bases``."""
        target, rows = self.target.bound(bases), self.part.rows
        if not rows.size:
            return
        if target.dtype in self.stored.decodes_to and self.part.columns is None:
            # In the order of memory; rows without elements lie where the next one does.
            order = np.lexsort((target.lengths, target.destinations[0]))
            bounds = _stretches(target[order])
            if rows.size >= _FEW * (bounds.size - 1):
                firsts = np.union1d(bounds, np.arange(0, rows.size, _ROWS_OF_A_JOB))
                for which in np.split(order, firsts[1:-1]):
                    yield _Job(self, rows[which], target[which], in_place=True)
                return
        for k in range(0, rows.size, _ROWS_COPIED):
            own = slice(k, k + _ROWS_COPIED)
            yield _Job(self, rows[own], target[own], in_place=False)


@dataclass(frozen=True, slots=True)
class _Job:
    """Rows that a thread decodes at a time.

    If their destinations are contiguous, in the given order, and columns and values stay as they
    are, rows are decoded in place; otherwise they are decoded elsewhere, and copied.
    """

    of: LibraryRows
    rows: NDArray[np.int64]
    target: RowTarget
    in_place: bool

    @property
    def n_elements(self) -> int:
        """Number of elements of the rows."""
        return int(self.target.lengths.sum())

    def do(self, indices: NDArray[np.int32], data: NDArray[np.float64]) -> bool:
        """Decode the rows; return whether the columns of each row ascend strictly.

        Parameters
        ----------
        indices, data
            Scratch memory for rows that are copied.
        """
        stored, part, n = self.of.stored, self.of.part, self.n_elements
        if self.in_place:
            own = [
                array_at(int(starts[0]), dtype, n)
                for starts, dtype in zip(self.target.destinations, self.target.dtypes, strict=True)
            ]
            stored.decode_rows(self.rows, *own)
            return part.check_columns(own[0], self.target)
        indices, values = indices[:n], data.view(stored.dtype)[:n]
        stored.decode_rows(self.rows, indices, values)
        indptr = np.concatenate([[0], np.cumsum(self.target.lengths)])
        return part.put(
            CsrRows(indptr, indices, values, stored.shape[1]), self.target, part.columns
        )


def decode(requests: Sequence[LibraryRows], bases: NDArray[np.int64], decoder: Decoder) -> bool:
    """Decode rows to their destinations; return whether the columns of each row ascend strictly.

    Parameters
    ----------
    requests
        The rows, all of which are decoded concurrently.
    bases
        Addresses of the groups of the destinations.
    decoder
        The decoder.

    Raises
    ------
    FormatError
        The storage is damaged.
    """
    jobs = deque(job for each in requests for job in each.jobs(bases))
    n_jobs = len(jobs)
    most = max((job.n_elements for job in jobs if not job.in_place), default=0)

    def work() -> bool:
        ascending = True
        scratch = np.empty(most, np.int32), np.empty(most, np.float64)
        with decoder.counters.wall_time(Counter.DECOMPRESSING):
            while jobs:
                try:
                    job = jobs.popleft()
                except IndexError:  # another thread was faster
                    break
                ascending &= job.do(*scratch)
        return ascending

    if decoder.threads is None:
        return work()
    running = [decoder.threads.submit(work) for _ in range(min(decoder.num_threads, n_jobs))]
    try:
        results = [each.result() for each in running]  # all of them, whatever they are
    except BaseException:
        # The other threads write into memory that the caller is about to release.
        jobs.clear()
        wait(running)
        raise
    return all(results)


def _stretches(target: RowTarget) -> NDArray[np.intp]:
    """Return the bounds of runs of rows that are contiguous in memory; rows are in its order."""
    goes_on = np.ones(max(0, len(target) - 1), np.bool_)
    for starts, dtype in zip(target.destinations, target.dtypes, strict=True):
        goes_on &= starts[1:] == starts[:-1] + target.lengths[:-1] * dtype.itemsize
    return np.concatenate([[0], np.flatnonzero(~goes_on) + 1, [len(target)]])


def read_in_threads(part: Part, stored: DirectCsr, decoder: Decoder) -> CsrRows:
    """Read the rows of a part, with values as stored.

    Raises
    ------
    FormatError
        The storage is damaged.
    """
    lengths = part.row_lengths()
    assert lengths is not None  # noqa: S101 - see `DirectCsr`
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    arrays = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], stored.dtype)
    target = RowTarget(
        lengths=lengths,
        destinations=[
            destination(np.full_like(lengths, k), indptr[:-1] * each.itemsize)
            for k, each in enumerate(arrays)
        ],
        dtypes=[each.dtype for each in arrays],
    )
    rows = LibraryRows(replace(part, column_map=None), stored, target)
    decode([rows], np.array([each.ctypes.data for each in arrays]), decoder)
    return CsrRows(indptr, *arrays, stored.shape[1])


# Dense rows of one source in a collection that is sparse.

_BATCH_BYTES = 1 << 25  # of dense rows that a thread has at once


def dense_as_csr(part: Part, decoder: Decoder) -> CsrRows:
    """Read dense rows, and return their non-zeros.

    Parameters
    ----------
    part
        Rows of an element of dense layout.
    decoder
        The decoder.

    Raises
    ------
    FormatError
        The storage is damaged.
    """
    stored = part.stored
    n_columns, dtype = stored.shape[1], stored.dtype
    row_bytes = n_columns * dtype.itemsize
    step = max(1, _BATCH_BYTES // max(1, row_bytes))
    batches = [part.rows[k : k + step] for k in range(0, part.rows.size, step)]
    chunks = part.chunked()

    def planned(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ChunkReads | None]:
        if not isinstance(chunks, DenseChunks) or not can_cast(chunks.dtype, dtype):
            return rows, None
        return rows, chunks.reads(rows, np.arange(rows.size) * row_bytes, dtype)

    def read(batch: tuple[NDArray[np.int64], ChunkReads | None]) -> tuple[NDArray[Any], ...]:
        rows, reads = batch
        if reads is None:
            return _nonzero(replace(part, rows=rows).read_rows())
        dense = np.empty((rows.size, n_columns), dtype)
        reads.run(np.array([dense.ctypes.data], np.int64), decoder.alone())
        return _nonzero(dense)

    found = list[tuple[NDArray[Any], ...]]()
    for first in range(0, len(batches), decoder.num_threads):
        # A source reads in one thread at a time; the chunks it describes are decoded by many.
        some = [planned(rows) for rows in batches[first : first + decoder.num_threads]]
        in_threads = all(reads is not None for _, reads in some)
        found += decoder.map(read, some) if in_threads else map(read, some)
    lengths, columns, values = (np.concatenate(each) for each in zip(*found, strict=True))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return CsrRows(indptr, columns, values, n_columns)


def _nonzero(dense: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the number of non-zeros of each row, their columns, and their values."""
    is_stored = dense != 0
    elements = np.flatnonzero(is_stored)
    columns = elements % max(1, dense.shape[1])
    return is_stored.sum(axis=1), columns, dense.reshape(-1)[elements]
