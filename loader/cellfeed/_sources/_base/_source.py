"""Base classes of sources, which read the rows of a plan from any storage.

A source does not shuffle: it describes the chunks of its rows, or returns ascending runs of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import CsrRows, ObsColumn, RaggedRows
from cellfeed._chunks import SlowRead
from cellfeed._layouts import CsrChunks, DenseChunks, Layout, PiecedCsr, RaggedChunks
from cellfeed._lazy import pd
from cellfeed._runs import Runs

__all__ = ["Layout", "Source", "StoredElement"]


class Source(ABC):
    """Base class of sources: stored cells with their elements, obs and var.

    Derive from it to read another storage. A source opens its storage lazily in each process, must
    be picklable and survive fork and spawn, and never shares a file handle or a connection between
    processes. A process calls it, and its elements, from one thread at a time.

    Attributes
    ----------
    location
        Its location, for messages and for the page cache. Opening the location gives only this
        source.
    elements
        The requested elements, at least one, by their requested names.
    can_be_forked
        Whether a process that has read from the source may fork worker processes. False if it uses
        a library that keeps threads, which do not survive a fork.
    """

    location: Location
    elements: Mapping[str, StoredElement]
    can_be_forked: bool = True

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return next(iter(self.elements.values())).shape[0]

    def file_bytes(self) -> int:
        """Return the total size of its files in bytes.

        By default, if the source is not local, this is the size of its elements, or 0 if unknown.
        """
        if self.location.path is None:
            return sum(each.stored_bytes() for each in self.elements.values())
        return sum(each.stat().st_size for each in self.files())

    def files(self) -> Sequence[Path]:
        """Return its local files.

        By default, this is the file at its location, or all files in that folder, and those of
        `linked_files`.
        """
        path = self.location.path
        if path is None:
            return ()
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        return [*(each for each in files if each.is_file()), *self.linked_files()]

    def linked_files(self) -> Sequence[Path]:
        """Return local files elsewhere to which its elements refer; by default, none."""
        return ()

    def version(self) -> str | None:
        """Return a digest that changes when the source is replaced; None if there is none.

        For example, it is a digest of the server's identifier of an object's version, its ETag.
        """
        return None

    def selection(self) -> str:
        """Return what selects its cells from those at the same location, such as a query.

        Empty if it has all cells.
        """
        return ""

    @abstractmethod
    def obs_names(self) -> Sequence[str]:
        """Return the names of the obs columns."""

    @abstractmethod
    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else.

        Parameters
        ----------
        columns
            Some of `obs_names`, at least one, each once.

        Returns
        -------
        A data frame with a row for each cell. Columns are numbers, text or categories.
        """

    def plain_obs(self, columns: Sequence[str]) -> Mapping[str, ObsColumn]:  # noqa: ARG002
        """Return those obs columns that can be read without pandas, whose import takes long.

        By default, there are none, and `read_obs` reads them all.

        Parameters
        ----------
        columns
            See `read_obs`.

        Returns
        -------
        Columns of numbers, in native byte order, and of text or of categories that are text.
        """
        return {}

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, and the names of their cells; `preshuffle` uses this.

        By default, whole columns are read, and the names of cells are their numbers. Text with
        missing values has pandas' dtype "string".

        Parameters
        ----------
        columns
            Some of `obs_names`, each once; may be empty.
        rows
            Ascending rows, int64, shape (n,); may be empty.

        Returns
        -------
        A data frame with a row for each of ``rows``, indexed by the names of the cells.
        """
        names = pd.Index([str(row) for row in rows.tolist()], dtype=object)
        if not columns:
            return pd.DataFrame(index=names)
        table = self.read_obs(columns).iloc[rows].set_index(names)
        # Text of which some may be missing, which a file would otherwise hold as "None".
        return table.astype({name: "string" for name in table if table[name].dtype == object})

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes, indexed by their names; `preshuffle` uses this.

        By default, it has no columns, and the names are those of the first element.
        """
        return pd.DataFrame(index=pd.Index(next(iter(self.elements.values())).var_names()))


class StoredElement(ABC):
    """Base class of the stored arrays of a source, such as its matrix, with a row for each cell.

    Derive from it to read another storage. Override `read_rows` if the storage returns rows; use
    `ChunkedCsr`, `ChunkedDense` or `ChunkedRagged` if cellfeed can decode its chunks.

    Attributes
    ----------
    shape
        Numbers of cells and columns. Images, for example, have more than two dimensions; ragged
        rows, which have no columns, have one.
    dtype
        Dtype of the stored values, in native byte order; it may be structured, except in sparse
        rows.
    layout
        "csr" for sparse rows, "dense" for dense rows, "ragged" for rows of different lengths.
    var
        The table with the names of its columns, such as ``var``; its own path if it is a data
        frame; None if its columns have no names, or if rows are ragged.
    row_order
        The stored row of each cell, distinct, int64, shape (n_cells,); None if rows are stored
        in the order of the cells. All methods take and return stored rows.
    stored_columns
        The column of each stored column, int32, shape (n_stored,); -1 if it is left out, -2 if it
        must not have elements; None if columns are stored in order. `chunked` and `read_rows` use
        stored columns.
    chunk_shape
        Shape of a chunk that is read as a whole; None if there are no chunks.
    rows_per_chunk
        Mean number of rows in a chunk.
    stored_as
        Path of the array in an AnnData file, such as ``layers/counts``; empty elsewhere.
    expected_row_bytes
        Mean number of bytes per row that `expect` requests; 0, the default, if it requests none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout
    var: str | None = "var"
    row_order: NDArray[np.int64] | None = None
    stored_columns: NDArray[np.int32] | None = None
    chunk_shape: tuple[int, ...] | None = None
    rows_per_chunk: float = 1.0
    stored_as: str = ""
    expected_row_bytes: float = 0.0

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns, str, shape (n_columns,); by default, their numbers.

        Called only when names are needed, or compared with those of other sources.
        """
        n_columns = self.shape[1] if len(self.shape) > 1 else 0
        return np.array([str(column) for column in range(n_columns)], object)

    def stored_bytes(self) -> int:
        """Return the size of values and indices in storage, in bytes; 0 if unknown."""
        return 0

    def codec(self) -> str:
        """Return the compression of the values, such as "gzip 4", "zstd, sharded" or "none"."""
        return "unknown"

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - for subclasses
        """Return why `chunked` returns None for reading as this dtype; None if it does not.

        The answer comes from metadata, without reading values. It is also None if a library reads
        at full speed.
        """
        return None

    def load_tables(self) -> None:  # noqa: B027 - there need not be any
        """Read the tables that locate rows now, not with the first rows.

        These are row pointers, tables of chunks and indexes of shards, which are read once and kept
        in the process, so that processes that are forked later share them. Without such
        tables, or if they have been read, this does nothing.

        Raises
        ------
        FormatError
            The storage is damaged, or was replaced since it was opened.
        """

    def row_lengths(self, runs: Runs) -> NDArray[np.int64] | None:  # noqa: ARG002 - for subclasses
        """Return how many elements each row of ``runs`` stores, int64, shape (n_rows_in_runs,).

        None if that is unknown before they are read, or if rows are dense.
        """
        return None

    def chunked(self) -> CsrChunks | PiecedCsr | DenseChunks | RaggedChunks | None:
        """Return the chunks of the rows, if cellfeed can decode them.

        Threads decode the chunks of many sources together. This is called for each fetch.

        Returns
        -------
        None if cellfeed cannot decode the storage; `read_rows` is called instead.

        Raises
        ------
        FormatError
            The storage is damaged, or was replaced since it was opened.
        """
        return None

    def expect(self, runs: Runs) -> object | None:  # noqa: ARG002 - for subclasses
        """Start requesting rows that `read_rows` will read, without waiting.

        If `expected_row_bytes` is not 0, this is called from another thread than `read_rows`, for
        several fetches before the first of them is read.

        Parameters
        ----------
        runs
            All rows of one fetch; see `read_rows`. These rows, or parts of them, are read later,
            possibly twice or never.

        Returns
        -------
        An object that keeps the requests alive. When it is dropped, rows that have not been read
        are discarded.
        """
        return None

    @abstractmethod
    def read_rows(self, runs: Runs) -> CsrRows | RaggedRows | NDArray[Any]:
        """Read the whole rows of ``runs``.

        Parameters
        ----------
        runs
            Ascending, disjoint runs of rows within the element, int64, shape (n, 2), each
            ``[start, stop)``; `expand` returns their rows. May be empty.

        Returns
        -------
        The rows in ascending order with the stored columns, of any numeric dtype: `CsrRows` if the
        layout is "csr", whose columns may be in any order and include duplicates (which are
        summed); an array of shape (n_rows, n_columns) if it is "dense"; `RaggedRows` if it is
        "ragged".

        Raises
        ------
        FormatError
            The storage is truncated or damaged; the message names location, element and rows.
        """
