"""What a source is: how the plan's rows are read, whatever the storage.

A source knows nothing of shuffling. It is given ascending row runs, and either returns their rows
or places them in memory that its caller owns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import CsrRows, summable
from cellfeed._chunks import ChunkReads
from cellfeed._errors import FormatError
from cellfeed._layouts import CsrTarget, Layout, RowTarget
from cellfeed._runs import Runs, count_rows

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
    """

    location: Location
    elements: Mapping[str, "StoredElement"]

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return next(iter(self.elements.values())).shape[0]

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
    returns rows, or `chunk_reads`, of one whose compressed chunks can be decoded here.

    Attributes
    ----------
    shape
        Number of cells and of columns.
    dtype
        Dtype of the stored values, in native byte order.
    layout
        Whether rows are stored sparse ("csr") or dense ("dense").
    var
        The table that names its columns, such as ``var``; None if none does.
    rows_per_chunk
        Mean number of rows in a unit of storage that is read as a whole.
    stored_as
        Path of the array in an AnnData file, such as ``layers/counts``; empty elsewhere.
    """

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: Layout
    var: str | None = "var"
    rows_per_chunk: float = 1.0
    stored_as: str = ""

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns, str, shape (n_columns,); unless overridden, numbers."""
        return np.array([str(column) for column in range(self.shape[1])], object)

    def stored_bytes(self) -> int:
        """Return how many bytes the values, and where they are, take in storage; 0 if unknown."""
        return 0

    def codec(self) -> str:
        """Return how the values are compressed: such as "gzip 4", "zstd, sharded" or "none"."""
        return "unknown"

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

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return how many elements each row of ``runs`` stores, shape (n_rows_in_runs,)."""
        if self.layout == "dense":
            return np.full(count_rows(runs), self.shape[1], np.int64)
        lengths: NDArray[np.int64] = np.diff(self._arrived(runs).indptr).astype(np.int64)
        return lengths

    def read_rows(self, runs: Runs) -> CsrRows | NDArray[Any]:  # noqa: ARG002 - for subclasses
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
        array of shape (n_rows, n_columns) if it is "dense".

        Raises
        ------
        FormatError
            The storage is truncated or damaged; names location, element and rows.
        """
        msg = f"{type(self).__name__} has to have `read_rows`, or both `row_lengths` and "
        raise NotImplementedError(msg + "`chunk_reads`")

    def chunk_reads(self, runs: Runs, target: RowTarget) -> ChunkReads | None:  # noqa: ARG002 - for subclasses
        """Return what to read where the storage is made of chunks that can be decoded here.

        Such reads of many sources are done together, by many threads.

        Parameters
        ----------
        runs, target
            As of `read_into`, but the target's destinations may not be bound to memory yet.

        Returns
        -------
        None if the storage is something else: then `read_into` is called.

        Raises
        ------
        FormatError
            The storage is damaged, or is not the one that was opened.
        """
        return None

    def read_into(self, runs: Runs, target: RowTarget) -> None:
        """Place the rows of ``runs``, ascending, where ``target`` says.

        Parameters
        ----------
        runs
            Ascending, disjoint row runs within the element.
        target
            One destination for each row: a `CsrTarget` only for an element of CSR layout, with the
            lengths that `row_lengths` gives, a `DenseTarget` for any. Its ``put`` does the
            rest.

        Raises
        ------
        FormatError
            The storage is truncated or damaged; names location, element and range.
        """
        rows = self._arrived(runs)
        try:
            if isinstance(target, CsrTarget):
                target.put(rows.indices, rows.data)
            else:
                target.put(rows if isinstance(rows, np.ndarray) else _dense(rows, target.dtype))
        except ValueError as error:
            raise self._wrong(str(error)) from error

    def _arrived(self, runs: Runs) -> Any:
        """Return the rows that `read_rows` gives, which are as many as were asked for."""
        rows, n_rows = self.read_rows(runs), count_rows(runs)
        if isinstance(rows, CsrRows) != (self.layout == "csr"):
            raise self._wrong(f"{type(rows).__name__} for an element of layout {self.layout!r}")
        if rows.shape != (n_rows, self.shape[1]):
            raise self._wrong(f"shape {rows.shape} in place of {(n_rows, self.shape[1])}")
        return rows

    def _wrong(self, what: str) -> FormatError:
        reads = f"{type(self).__name__}.read_rows"
        return FormatError(f"`{reads}` returned wrong rows: {what}; the storage may be damaged")


def _dense(rows: CsrRows, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return sparse rows as dense ones; values of the same column are added up, as SciPy does."""
    if rows.indices.size and not 0 <= rows.indices.min() <= rows.indices.max() < rows.n_vars:
        raise ValueError(f"a column index is outside [0, {rows.n_vars})")
    values = rows.data.astype(summable(dtype), copy=False)
    dense: NDArray[Any] = sp.csr_array(
        (values, rows.indices, rows.indptr), shape=rows.shape
    ).toarray()
    return dense
