"""The source protocol: how the plan's rows are read, whatever the storage.

A source knows nothing of shuffling: it says where rows lie, or reads runs of them, ascending.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._cells import CsrRows
from cellfeed._chunks import SlowRead
from cellfeed._layouts import ChunkedCsr, ChunkedDense, Layout
from cellfeed._runs import Runs

__all__ = ["Layout", "Source", "StoredElement"]


class Source(Protocol):
    """Cells in storage: some arrays that are aligned with them, and their annotations.

    A source opens its storage lazily in each process, can be pickled, survives fork and spawn,
    and never shares a file handle between processes. One process may call it, and its elements,
    from one thread at a time.
    """

    @property
    def path(self) -> Path:
        """The file or folder, for messages and for the page cache."""
        ...

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        ...

    @property
    def elements(self) -> Mapping[str, "StoredElement"]:
        """The arrays that were asked for, at least one, by the names they were asked for by."""
        ...

    def obs_names(self) -> tuple[str, ...]:
        """Return the names of the obs columns."""
        ...

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else.

        Raises
        ------
        ColumnError
            A column is absent.
        """
        ...


class StoredElement(Protocol):
    """One array of a source, such as its matrix, with a row for each of its cells."""

    @property
    def stored_as(self) -> str:
        """Path of the array in the storage, such as ``X`` or ``layers/counts``."""
        ...

    @property
    def var(self) -> str | None:
        """The table that names its columns, such as ``var``; its own path if it is a data frame.

        None if its columns have no names.
        """
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells and of columns; of images, say, more than two numbers."""
        ...

    @property
    def row_order(self) -> NDArray[np.int64] | None:
        """Which stored row each cell has, distinct, int64, shape (n_cells,).

        None if rows are stored in the order of the cells. What follows speaks of stored rows.
        """
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored values, in native byte order."""
        ...

    @property
    def layout(self) -> Layout:
        """Whether rows are stored sparse or dense."""
        ...

    @property
    def chunk_shape(self) -> tuple[int, ...] | None:
        """Shape of a unit of storage that is read as a whole; None if there are no such units."""
        ...

    @property
    def rows_per_chunk(self) -> float:
        """Mean number of rows in a unit of storage that is read as a whole."""
        ...

    def stored_bytes(self) -> int:
        """Return how many bytes the values, and where they are, take in storage."""
        ...

    def codec(self) -> str:
        """Return how the values are compressed: such as "gzip 4", "zstd, sharded" or "none"."""
        ...

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns, str, shape (n_columns,); their numbers without `var`.

        Called only where they are asked for, or compared with those of other sources.
        """
        ...

    def load_tables(self) -> None:
        """Read what says where rows lie now, rather than with the first rows.

        Row pointers, tables of chunks, indexes of shards: whatever is read once and kept in the
        process, so that processes that are forked afterwards share it. A source that has no
        such tables does nothing. Called again, it does nothing either.

        Raises
        ------
        FormatError
            The storage is damaged, or is not the one that was opened.
        """
        ...

    def row_lengths(self, runs: Runs) -> NDArray[np.int64] | None:
        """Return how many elements each row of ``runs`` stores, shape (n_rows_in_runs,).

        None if that is known only once they have been read, as of dense rows.
        """
        ...

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why `chunked` gives none for values of this dtype; None if it gives some.

        This is known from metadata, and nothing is read for it. None also where a library reads
        as fast as can be.
        """
        ...

    def chunked(self) -> ChunkedCsr | ChunkedDense | None:
        """Return where rows lie, if the storage is made of chunks that can be decoded here.

        Chunks of many sources are decoded together, by many threads. It is asked for each fetch.

        Returns
        -------
        None if the storage is something else: then `read_rows` is called.

        Raises
        ------
        FormatError
            The storage is damaged, or is not the one that was opened.
        """
        ...

    def read_rows(self, runs: Runs) -> CsrRows | NDArray[Any]:
        """Return the rows of ``runs``, of any numeric dtype.

        Parameters
        ----------
        runs
            Ascending, disjoint row runs within the element.

        Returns
        -------
        Of CSR layout sparse rows, whose columns need not ascend; of dense layout an array of
        shape (n_rows_in_runs, n_columns).

        Raises
        ------
        FormatError
            The storage is truncated or damaged; names file, element and range.
        """
        ...
