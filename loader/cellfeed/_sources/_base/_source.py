"""What a source is: how the plan's rows are read, whatever the storage.

A source knows nothing of shuffling: it says in which chunks its rows lie, or returns runs of them,
ascending.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import CsrRows, RaggedRows
from cellfeed._chunks import SlowRead
from cellfeed._layouts import CsrChunks, DenseChunks, Layout, PiecedCsr, RaggedChunks
from cellfeed._runs import Runs

__all__ = ["Layout", "Source", "StoredElement"]


class Source(ABC):
    """Cells in storage: some arrays that are aligned with them, and their annotations.

    Derive from it to read another storage. A source opens its storage lazily in each process, can
    be pickled, survives fork and spawn, and never shares a file handle or a connection between
    processes. One process may call it, and its elements, from one thread at a time.

    Attributes
    ----------
    location
        Where it is stored, for messages and for the page cache. Opened, it gives this source alone.
    elements
        The arrays that were asked for, at least one, by the names they were asked for by.
    can_be_forked
        Whether worker processes may be forked from a process that has read from it. What keeps
        threads of a library, which no fork has, says False.
    """

    location: Location
    elements: Mapping[str, "StoredElement"]
    can_be_forked: bool = True

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return next(iter(self.elements.values())).shape[0]

    def file_bytes(self) -> int:
        """Return how many bytes its files have, with all that is in them.

        Unless it is overridden, those of its elements alone where it is not on this machine; 0 if
        that is unknown.
        """
        if self.location.path is None:
            return sum(each.stored_bytes() for each in self.elements.values())
        return sum(each.stat().st_size for each in self.files())

    def files(self) -> Sequence[Path]:
        """Return the files of this machine that it lies in.

        Unless it is overridden, that of its location, or all in that folder.
        """
        path = self.location.path
        if path is None:
            return ()
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        return [each for each in files if each.is_file()]

    def version(self) -> str | None:
        """Return what tells it from another one that was put in its place; None if nothing does.

        It is a digest: of what a server calls this version of an object, such as its ETag.
        """
        return None

    def selection(self) -> str:
        """Return what tells its cells apart from others of the same location: a query or so.

        Empty if it has all of them.
        """
        return ""

    @abstractmethod
    def obs_names(self) -> Sequence[str]:
        """Return the names of the obs columns."""

    @abstractmethod
    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else.

        Parameters
        ----------
        columns
            Some of `obs_names`, at least one, each once.

        Returns
        -------
        A row for each cell. Columns are numbers, text or categories.
        """

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read some rows of obs columns, and the names of their cells; for `preshuffle`.

        Unless it is overridden, columns are read whole, and cells are named by their numbers.
        Text that may be missing has pandas' dtype "string".

        Parameters
        ----------
        columns
            Some of `obs_names`, each once; there may be none.
        rows
            Ascending, int64, shape (n,); there may be none.

        Returns
        -------
        A row for each of ``rows``, whose index is the names of the cells.
        """
        names = pd.Index([str(row) for row in rows.tolist()], dtype=object)
        if not columns:
            return pd.DataFrame(index=names)
        table = self.read_obs(columns).iloc[rows].set_index(names)
        # Text of which some may be missing, which a file would otherwise hold as "None".
        return table.astype({name: "string" for name in table if table[name].dtype == object})

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes, whose index is their names; for `preshuffle`.

        Unless it is overridden, it has names alone, those of the first element.
        """
        return pd.DataFrame(index=pd.Index(next(iter(self.elements.values())).var_names()))


class StoredElement(ABC):
    """One array of a source, such as its matrix, with a row for each of its cells.

    Derive from it to read another storage. What reads is either `read_rows`, of a storage that
    returns rows, or `ChunkedCsr`, `ChunkedDense` and `ChunkedRagged`, of one whose compressed
    chunks can be decoded here.

    Attributes
    ----------
    shape
        Number of cells and of columns; of images, say, more than two numbers; of ragged rows,
        which have no columns, that of cells alone.
    dtype
        Dtype of the stored values, in native byte order; it may have fields, but in sparse rows.
    layout
        Whether rows are stored sparse ("csr") or dense ("dense"), or are of any length ("ragged").
    var
        The table that names its columns, such as ``var``; its own path if it is a data frame; None
        if its columns have no names, as those of ragged rows.
    row_order
        Which stored row each cell has, distinct, int64, shape (n_cells,); None if rows are stored
        in the order of the cells. What follows speaks of stored rows.
    stored_columns
        Which column each stored column is, -1 if it is left out, -2 if no element of it may be
        there, int32, shape (n_stored,); None if columns are stored as they are. `chunked` and
        `read_rows` speak of stored columns.
    chunk_shape
        Shape of a unit of storage that is read as a whole; None if there are no such units.
    rows_per_chunk
        Mean number of rows in such a unit.
    stored_as
        Path of the array in an AnnData file, such as ``layers/counts``; empty elsewhere.
    expected_row_bytes
        Bytes that `expect` brings of a row, on average; 0, as here, if it brings nothing.
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
        """Return the names of the columns, str, shape (n_columns,); unless overridden, numbers.

        Called only where they are asked for, or compared with those of other sources.
        """
        n_columns = self.shape[1] if len(self.shape) > 1 else 0
        return np.array([str(column) for column in range(n_columns)], object)

    def stored_bytes(self) -> int:
        """Return how many bytes the values, and where they are, take in storage; 0 if unknown."""
        return 0

    def codec(self) -> str:
        """Return how the values are compressed: such as "gzip 4", "zstd, sharded" or "none"."""
        return "unknown"

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - for subclasses
        """Return why `chunked` gives none for values of this dtype; None if it gives some.

        This is known from metadata, and nothing is read for it. None also where a library reads
        as fast as can be.
        """
        return None

    def load_tables(self) -> None:  # noqa: B027 - there need not be any
        """Read what says where rows lie now, rather than with the first rows.

        Row pointers, tables of chunks, indexes of shards: whatever is read once and kept in the
        process, so that processes that are forked afterwards share it. A source that has no
        such tables does nothing. Called again, it does nothing either.

        Raises
        ------
        FormatError
            The storage is damaged, or is not the one that was opened.
        """

    def row_lengths(self, runs: Runs) -> NDArray[np.int64] | None:  # noqa: ARG002 - for subclasses
        """Return how many elements each row of ``runs`` stores, int64, shape (n_rows_in_runs,).

        None if that is known only once they have been read, as of dense rows.
        """
        return None

    def chunked(self) -> CsrChunks | PiecedCsr | DenseChunks | RaggedChunks | None:
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
        return None

    def expect(self, runs: Runs) -> object | None:  # noqa: ARG002 - for subclasses
        """Begin to bring rows that `read_rows` will be asked for, and do not wait.

        Called from another thread than `read_rows`, for several fetches before the first of
        them is read, if `expected_row_bytes` is not 0.

        Parameters
        ----------
        runs
            As of `read_rows`: all rows of one fetch. They, or parts of them, are then read, perhaps
            twice or never.

        Returns
        -------
        What keeps them coming. When it is let go, what nobody has read by then is given up.
        """
        return None

    @abstractmethod
    def read_rows(self, runs: Runs) -> CsrRows | RaggedRows | NDArray[Any]:
        """Read the rows of ``runs``, whole; their lengths need not be known before.

        Parameters
        ----------
        runs
            Ascending, disjoint row runs within the element, int64, shape (n, 2), each
            ``[start, stop)``; `expand` gives their rows. There may be none.

        Returns
        -------
        The rows in ascending order with the element's own columns: `CsrRows` if the layout is
        "csr", whose columns may be in any order, and there twice (values are then added up); an
        array of shape (n_rows, n_columns) if it is "dense"; `RaggedRows` if it is "ragged". Of any
        numeric dtype.

        Raises
        ------
        FormatError
            The storage is truncated or damaged; names location, element and rows.
        """
