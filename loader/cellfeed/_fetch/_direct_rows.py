"""Sparse rows that a library decodes directly into minibatches, in our threads."""

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import threads_until_left
from cellfeed._bytes._buffers import array_at, destination
from cellfeed._bytes._remote import outside_lock
from cellfeed._decode import ChunkReads, Counter, Decoder
from cellfeed._fetch._parts import Part
from cellfeed._progress import ProgressLine
from cellfeed._rows import CsrRows, CsrTarget
from cellfeed._runs import expand
from cellfeed._storages import DirectCsr, StoredElement
from cellfeed.machine import usable_cpu_count

_ROWS_OF_A_JOB = 256  # enough to make little of a job's own time
_ROWS_COPIED = 32  # few enough to stay in the cache
_FEW = 8  # rows that lie together, below which they are decoded elsewhere, and copied


@dataclass(frozen=True)
class DirectRows:
    """Rows of a source, with all columns.

    Parameters
    ----------
    part, stored
        The part, and the element of its source.
    target
        Destinations of the rows.
    """

    part: Part
    stored: DirectCsr
    target: CsrTarget

    @cached_property
    def announced(self) -> ChunkReads:
        """The byte ranges of the rows in storage."""
        return self.stored.stored_rows(expand(self.part.runs))

    def jobs(self, bases: NDArray[np.int64]) -> list["_Job"]:
        """Return the decoding jobs, bound to memory whose groups begin at ``bases``."""
        target, rows = self.target.bound(bases), expand(self.part.runs)
        if not rows.size:
            return []
        if target.dtype in self.stored.decodes_to and self.part.columns is None:
            # As they lie in memory; those without elements lie where the next one does.
            order = np.lexsort((target.lengths, target.index_destinations))
            bounds = _stretches(target[order])
            if rows.size >= _FEW * (bounds.size - 1):
                pieces = np.unique(
                    np.concatenate([bounds, np.arange(0, rows.size, _ROWS_OF_A_JOB)])
                )
                return [
                    _InPlace(self, rows[which], target[which])
                    for which in np.split(order, pieces[1:-1])
                ]
        return [
            _Copied(self, rows[k : k + _ROWS_COPIED], target[k : k + _ROWS_COPIED])
            for k in range(0, rows.size, _ROWS_COPIED)
        ]


@dataclass(frozen=True, slots=True)
class _InPlace:
    """Rows whose destinations are contiguous, in the given order."""

    of: DirectRows
    rows: NDArray[np.int64]
    target: CsrTarget

    def do(self, scratch: "_Scratch") -> bool:  # noqa: ARG002 - of a job
        """Decode the rows; return whether the columns of each row ascend strictly."""
        target, n = self.target, int(self.target.lengths.sum())
        indices = array_at(int(target.index_destinations[0]), target.index_dtype, n)
        data = array_at(int(target.data_destinations[0]), target.dtype, n)
        self.of.stored.decode_rows(self.rows, indices, data)
        return self.of.stored.is_canonical


@dataclass(frozen=True, slots=True)
class _Copied:
    """Rows with scattered destinations, or whose columns or values change."""

    of: DirectRows
    rows: NDArray[np.int64]
    target: CsrTarget

    def do(self, scratch: "_Scratch") -> bool:
        """Decode and copy the rows; return whether the columns of each row ascend strictly."""
        stored, part = self.of.stored, self.of.part
        indptr = np.concatenate([[0], np.cumsum(self.target.lengths)])
        indices, data = scratch.of(int(indptr[-1]), stored.dtype)
        stored.decode_rows(self.rows, indices, data)
        decoded = CsrRows(indptr, indices, data, stored.shape[1])
        try:
            return self.target.put(decoded, part.columns)
        except ValueError as error:
            raise part.wrong(error) from error


_Job = _InPlace | _Copied


class _Scratch:
    """Scratch memory of one thread."""

    def __init__(self) -> None:
        self._indices = np.empty(0, np.int32)
        self._data = np.empty(0, np.float64)

    def of(self, n: int, dtype: np.dtype[Any]) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """Return column indices and values of ``n`` elements, valid until the next call."""
        if self._indices.size < n:
            self._indices = np.empty(2 * n, np.int32)
            self._data = np.empty(2 * n, np.float64)
        return self._indices[:n], self._data.view(dtype)[:n]


def decode(rows: Iterable[DirectRows], bases: NDArray[np.int64], decoder: Decoder) -> bool:
    """Decode rows to their destinations; return whether the columns of each row ascend strictly.

    Parameters
    ----------
    rows
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
    left = deque(job for each in rows for job in each.jobs(bases))
    n_jobs = len(left)

    def work() -> bool:
        ascending, scratch = True, _Scratch()
        with decoder.counters.wall_time(Counter.DECOMPRESSING):
            while left:
                try:
                    job = left.popleft()
                except IndexError:  # another thread was faster
                    break
                ascending &= job.do(scratch)
        return ascending

    if decoder.threads is None:
        return work()
    running = [decoder.threads.submit(work) for _ in range(min(decoder.n_threads, n_jobs))]
    try:
        results = [each.result() for each in running]  # all of them, whatever they are
    except BaseException:
        # The other threads write into memory that the caller is about to let go.
        left.clear()
        wait(running)
        raise
    return all(results)


def read_in_threads(part: Part, stored: DirectCsr, decoder: Decoder) -> CsrRows:
    """Read the rows of a part, with values as stored.

    Raises
    ------
    FormatError
        The storage is damaged.
    """
    lengths = stored.row_lengths(part.runs)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices, data = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], stored.dtype)
    target = CsrTarget(
        lengths=lengths,
        index_destinations=destination(np.zeros_like(lengths), indptr[:-1] * indices.itemsize),
        data_destinations=destination(np.ones_like(lengths), indptr[:-1] * data.itemsize),
        index_dtype=indices.dtype,
        dtype=data.dtype,
    )
    rows = DirectRows(replace(part, column_map=None), stored, target)
    decode([rows], np.array([indices.ctypes.data, data.ctypes.data]), decoder)
    return CsrRows(indptr, indices, data, stored.shape[1])


def _stretches(target: CsrTarget) -> NDArray[np.intp]:
    """Return the bounds of runs of rows that are contiguous in memory; rows are in its order."""
    goes_on = np.ones(max(0, len(target) - 1), np.bool_)
    for starts, dtype in (
        (target.index_destinations, target.index_dtype),
        (target.data_destinations, target.dtype),
    ):
        goes_on &= starts[1:] == starts[:-1] + target.lengths[:-1] * dtype.itemsize
    return np.concatenate([[0], np.flatnonzero(~goes_on) + 1, [len(target)]])


# Reading row pointers and chunk tables of many matrices concurrently.

_POLL_SECONDS = 0.2
_AT_ONCE = 16


def load_tables(elements: Sequence[StoredElement], *, are_remote: bool = False) -> None:
    """Make each element read its tables, several concurrently; see `StoredElement.load_tables`.

    After two seconds, progress is shown on the terminal.

    Parameters
    ----------
    elements
        Elements of any sources.
    are_remote
        Whether reading them is limited by latency, not by the processor.

    Raises
    ------
    FormatError
        A table is damaged; the first one that was found.
    """
    if not elements:
        return
    n_threads = min(len(elements), _AT_ONCE if are_remote else usable_cpu_count())
    with (
        threads_until_left(n_threads, "cellfeed-tables") as threads,
        ProgressLine() as line,
    ):
        jobs = [threads.submit(outside_lock, each.load_tables) for each in elements]
        try:
            n_left = len(jobs)
            while n_left:
                ended, left = wait(jobs, _POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for job in jobs:
                    if job in ended:
                        job.result()
                n_left = len(left)
                line.show(
                    f"Reading row pointers and chunk tables: {len(ended)} of {len(jobs)} matrices"
                )
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
