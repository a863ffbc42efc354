"""Dense rows of one source in a collection that is sparse."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CsrRows
from cellfeed._chunks import ChunkReads, Decoder
from cellfeed._layouts import DenseChunks, DenseTarget
from cellfeed._reading._parts import Part
from cellfeed._runs import Runs, count_rows, expand, merge_consecutive

__all__ = ["dense_as_csr"]

_PIECE_BYTES = 1 << 25  # of dense rows that a thread has at once


def dense_as_csr(part: Part, decoder: Decoder) -> CsrRows:
    """Read dense rows, and return their non-zero elements.

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
    rows = expand(part.runs)
    step = max(1, _PIECE_BYTES // max(1, n_columns * dtype.itemsize))
    pieces = [merge_consecutive(rows[k : k + step]) for k in range(0, rows.size, step)]
    chunked = stored.chunked()

    def planned(runs: Runs) -> tuple[Runs, ChunkReads | None]:
        if not isinstance(chunked, DenseChunks):
            return runs, None
        nowhere = np.arange(count_rows(runs), dtype=np.int64) * n_columns * dtype.itemsize
        target = DenseTarget(n_vars=n_columns, destinations=nowhere, dtype=dtype)
        return runs, target.reads_from(chunked, runs, None)

    def read(piece: tuple[Runs, ChunkReads | None]) -> tuple[NDArray[Any], ...]:
        runs, reads = piece
        if reads is None:
            return _nonzero(replace(part, runs=runs).read_rows())
        dense = np.empty((count_rows(runs), n_columns), dtype)
        reads.run(np.array([dense.ctypes.data], np.int64), decoder.alone())
        return _nonzero(dense)

    found = list[tuple[NDArray[Any], ...]]()
    for first in range(0, len(pieces), decoder.n_threads):
        # A source is asked from one thread at a time; what it says is decoded by many.
        batch = [planned(runs) for runs in pieces[first : first + decoder.n_threads]]
        in_threads = all(reads is not None for _, reads in batch)
        found += decoder.map(read, batch) if in_threads else map(read, batch)
    lengths, columns, values = (np.concatenate(each) for each in zip(*found, strict=True))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return CsrRows(indptr, columns, values, n_columns)


def _nonzero(dense: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the number of elements of each row, their columns, and their values."""
    is_stored = dense != 0
    elements = np.flatnonzero(is_stored)
    columns = elements % max(1, dense.shape[1])
    return is_stored.sum(axis=1), columns, dense.reshape(-1)[elements]
