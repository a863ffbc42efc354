"""Elements whose rows lie in another order than the cells of their source."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkReads
from cellfeed._layouts import Layout, RowTarget
from cellfeed._runs import Runs, expand, merge_consecutive
from cellfeed._sources._base import StoredElement

__all__ = ["ReorderedElement"]


class ReorderedElement:
    """An element with a row for each cell, in the order of the cells.

    Parameters
    ----------
    stored
        The element as it lies in storage.
    rows
        Its row of each cell, distinct, int64, shape (n_cells,).
    """

    def __init__(self, stored: StoredElement, rows: NDArray[np.int64]) -> None:
        self._stored = stored
        self._rows = rows

    @property
    def stored_as(self) -> str:
        """Path of the array in the storage."""
        return self._stored.stored_as

    @property
    def var(self) -> str | None:
        """The table that names its columns."""
        return self._stored.var

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells and of columns."""
        return self._stored.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored values."""
        return self._stored.dtype

    @property
    def layout(self) -> Layout:
        """Whether rows are stored sparse or dense."""
        return self._stored.layout

    @property
    def rows_per_chunk(self) -> float:
        """Mean number of rows in a unit of storage that is read as a whole."""
        return self._stored.rows_per_chunk

    def stored_bytes(self) -> int:
        """Return how many bytes it takes in storage."""
        return self._stored.stored_bytes()

    def codec(self) -> str:
        """Return how the values are compressed."""
        return self._stored.codec()

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        return self._stored.var_names()

    def load_tables(self) -> None:
        """Read what says where rows lie."""
        self._stored.load_tables()

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return how many elements each row of ``runs`` stores."""
        stored_runs, order = self._as_stored(runs)
        lengths = np.empty(order.size, np.int64)
        lengths[order] = self._stored.row_lengths(stored_runs)
        return lengths

    def chunk_reads(self, runs: Runs, target: RowTarget) -> ChunkReads | None:
        """Return what to read, None if only the format's own library can read it."""
        stored_runs, order = self._as_stored(runs)
        return self._stored.chunk_reads(stored_runs, target[order])

    def read_into(self, runs: Runs, target: RowTarget) -> None:
        """Place the rows of ``runs`` where ``target`` says."""
        stored_runs, order = self._as_stored(runs)
        self._stored.read_into(stored_runs, target[order])

    def _as_stored(self, runs: Runs) -> tuple[Runs, NDArray[np.intp]]:
        """Return runs of stored rows, and which of the rows of ``runs`` each of theirs is."""
        rows = self._rows[expand(runs)]
        order = np.argsort(rows)
        return merge_consecutive(rows[order]), order
