"""Reading rows of an element into guarded memory, by chunks or through a library."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import Buffer
from cellfeed._bytes import Location
from cellfeed._chunks import ChunkReads, Decoder, Verify, can_cast
from cellfeed._chunks._reads import Done
from cellfeed._layouts import (
    CsrChunks,
    CsrGroup,
    CsrTarget,
    DenseChunks,
    DenseTarget,
    Group,
    PiecedCsr,
    RaggedChunks,
    RaggedTarget,
    RowTarget,
    csr_groups,
    dense_groups,
    ragged_groups,
)
from cellfeed._reading import Part
from cellfeed._runs import expand, merge_consecutive
from cellfeed._sources import StoredElement
from cellfeed.testing._memory import GuardedPool

__all__ = ["GuardedRead"]


class GuardedRead:
    """Memory for rows of an element, in two groups.

    Parameters
    ----------
    stored, rows
        An element of a source, and distinct, ascending rows of it.
    order
        ``rows[order]`` is the order of delivery.
    dtype
        Dtype of the values.
    """

    def __init__(
        self,
        stored: StoredElement,
        rows: NDArray[np.int64],
        order: NDArray[np.intp],
        *,
        dtype: np.dtype[Any],
    ) -> None:
        self._part = Part(
            location=Location("case"),
            stored=stored,
            runs=merge_consecutive(rows),
            rows=slice(0, rows.size),
            column_map=None,
        ).as_stored(0)
        bounds = np.array([0, len(order) // 2, len(order)], np.int64)
        self._delivered = np.split(rows[order], bounds[1:-1])
        n_vars = math.prod(stored.shape[1:])
        lengths = np.empty(rows.size, np.int64)
        self._groups: Sequence[Group]
        self._target: RowTarget
        if stored.layout == "csr":
            lengths[self._part.rows] = np.diff(self._part.read_rows().indptr)
            self._groups, self._target, _ = csr_groups(
                lengths, order, bounds, n_vars=n_vars, dtype=dtype
            )
        elif stored.layout == "ragged":
            lengths[self._part.rows] = self._part.read_rows().lengths
            self._groups, self._target, _ = ragged_groups(lengths, order, bounds, dtype=dtype)
        else:
            self._groups, self._target, _ = dense_groups(
                len(order),
                order,
                bounds,
                row_shape=stored.shape[1:],
                dtype=dtype,
            )
        self._pool = GuardedPool()
        self._buffers: list[Buffer] = [self._pool.acquire(group.n_bytes) for group in self._groups]
        self._bases = np.array([buffer.address for buffer in self._buffers], np.int64)
        self._ordered = True

    def chunk_reads(self) -> ChunkReads | None:
        """Return the chunk reads, if cellfeed can decode the chunks of the element."""
        target, runs = self._target[self._part.rows], self._part.runs
        chunked = self._part.stored.chunked()
        if chunked is None or not can_cast(_dtype(chunked), target.dtype):
            return None
        if isinstance(chunked, CsrChunks) and isinstance(target, CsrTarget):
            starts, _ = chunked.ranges(expand(runs))
            return ChunkReads.concatenate(target.reads_from(chunked, starts, None))
        if isinstance(chunked, PiecedCsr) and isinstance(target, CsrTarget):
            return ChunkReads.concatenate(chunked.pieces(expand(runs)).reads_to(target, None))
        if isinstance(chunked, DenseChunks) and isinstance(target, DenseTarget):
            return target.reads_from(chunked, runs, None)
        if isinstance(chunked, RaggedChunks) and isinstance(target, RaggedTarget):
            return target.reads_from(chunked, expand(runs))
        return None

    def by_chunks(self, reads: ChunkReads, n_threads: int, verify: Verify) -> Done:
        """Read by chunks."""
        reads.readahead()
        with ThreadPoolExecutor(n_threads) as threads:
            decoder = Decoder(threads if n_threads > 1 else None, n_threads, verify)
            done = reads.run(self._bases, decoder)
        self._ordered = done.ascending
        return done

    def by_library(self) -> None:
        """Read through the format's own library."""
        target = self._target[self._part.rows].bound(self._bases)
        self._ordered = target.put(self._part.read_rows())

    def groups(self) -> list[tuple[Any, NDArray[np.int64]]]:
        """Return the matrix of each group, and its rows; check for writes out of bounds."""
        self._pool.check()
        matrices = list[Any]()
        for group, buffer in zip(self._groups, self._buffers, strict=True):
            if isinstance(group, CsrGroup):
                distinct = self._ordered or group.sort(buffer)
                matrices.append(group.over(buffer, distinct=distinct))
            else:
                matrices.append(group.over(buffer))
        return list(zip(matrices, self._delivered, strict=True))


def _dtype(chunked: CsrChunks | PiecedCsr | DenseChunks | RaggedChunks) -> np.dtype[Any]:
    if isinstance(chunked, RaggedChunks | PiecedCsr):
        return chunked.dtype
    return (chunked.data if isinstance(chunked, CsrChunks) else chunked.values).dtype
