"""Columns of each source as columns of the collection: which become which, or are left out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import BufferPool
from cellfeed._cells import CsrRows
from cellfeed._chunks import count_selected, select_columns
from cellfeed._layouts._csr import CsrGroup, canonical
from cellfeed._layouts._dense import DenseGroup

__all__ = ["ColumnMaps"]


class ColumnMaps:
    """What each column of each source is in a collection.

    Parameters
    ----------
    maps
        One for each source: the column of the collection that each of its columns becomes,
        distinct, -1 where it is left out, shape (n_columns of the source,).
    n_columns
        Columns of the collection; those that a source lacks are zero.
    """

    def __init__(self, maps: Sequence[NDArray[np.integer]], n_columns: int) -> None:
        self.n_columns = n_columns
        self._widths = np.array([each.size for each in maps], np.int64)
        # Files of one experiment have the same genes: what is the same is kept once.
        starts, kept, end = dict[bytes, int](), list[NDArray[np.int32]](), 0
        for each in maps:
            columns = each.astype(np.int32)
            if starts.setdefault(columns.tobytes(), end) == end:
                kept.append(columns)
                end += columns.size
        self._offsets = np.array([starts[each.astype(np.int32).tobytes()] for each in maps])
        self._columns = np.concatenate(kept)

    @property
    def stored_width(self) -> int:
        """The most columns that a source has."""
        return int(self._widths.max())

    def of_source(self, source: int) -> NDArray[np.int32]:
        """Return the column of the collection that each column of a source becomes, or -1."""
        return self._columns[self._offsets[source] :][: self._widths[source]]

    def join_csr(
        self, rows: CsrRows, sources: NDArray[np.intp], pool: BufferPool, *, ordered: bool
    ) -> CsrRows:
        """Return sparse rows with the columns of the collection.

        Parameters
        ----------
        rows, sources
            Rows with columns of their sources, and which source each is from.
        pool
            Where memory comes from.
        ordered
            Whether columns ascend in each row; see `CsrGroup.over`.
        """
        offsets, counts = self._offsets[sources], np.empty(sources.size, np.int64)
        count_selected(rows.indptr, rows.indices, offsets, self._columns, counts)
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(rows.indptr.dtype)
        group = CsrGroup(indptr, rows.data.dtype, self.n_columns)
        joined = group.over(pool.acquire(group.n_bytes), ordered=True)
        bits = np.dtype(f"u{rows.data.itemsize}")
        stored, kept = rows.data.view(bits), joined.data.view(bits)
        ascending = select_columns(
            rows.indptr, rows.indices, stored, offsets, self._columns, joined.indices, kept
        )
        return joined if ordered and ascending else canonical(joined)

    def join_dense(
        self, rows: NDArray[Any], sources: NDArray[np.intp], pool: BufferPool
    ) -> NDArray[Any]:
        """Return dense rows with the columns of the collection.

        Parameters
        ----------
        rows, sources, pool
            As of `join_csr`; each row begins with the columns of its source.
        """
        group = DenseGroup(len(rows), self.n_columns, rows.dtype)
        joined = group.over(pool.acquire(group.n_bytes))
        joined[...] = 0
        for source in np.unique(sources).tolist():
            own, columns = np.flatnonzero(sources == source), self.of_source(source)
            kept = np.flatnonzero(columns >= 0)
            joined[np.ix_(own, columns[kept])] = rows[np.ix_(own, kept)]
        return joined
