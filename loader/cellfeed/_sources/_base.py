"""The source protocol: how the plan's rows are read, whatever the storage.

A source knows nothing of shuffling. It is given ascending row runs, and a target that says where
each row goes in memory that its caller owns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._chunks import ChunkReads
from cellfeed._layouts import Layout, RowTarget
from cellfeed._runs import Runs

__all__ = ["Layout", "Source", "StoredElement"]


class Source(Protocol):
    """Cells in storage: some arrays that are aligned with them, and their annotations.

    A source opens its storage lazily in each process, can be pickled, survives fork and spawn,
    and never shares a file handle between processes. One process may call it, and its elements,
    from one thread at a time.
    """

    @property
    def location(self) -> Location:
        """Where it is stored, for messages and for the page cache."""
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
        """The table that names its columns, such as ``var``; None if none does."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells and of columns."""
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
        """Return the names of the columns, str, shape (n_columns,); their numbers without `var`."""
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

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return how many elements each row of ``runs`` stores, shape (n_rows_in_runs,)."""
        ...

    def chunk_reads(self, runs: Runs, target: RowTarget) -> ChunkReads | None:
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
        ...

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
            The storage is truncated or damaged; names file, element and range.
        """
        ...
