"""The source protocol: how the plan's rows are read, whatever the storage.

A source knows nothing of shuffling. It is given ascending row runs and fills buffers that its
caller owns, so that one set of buffers serves a whole epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._runs import Runs

__all__ = ["CsrBuffer", "DenseBuffer", "Layout", "RowBuffer", "Source"]

Layout = Literal["csr", "dense"]


@dataclass(frozen=True, slots=True)
class CsrBuffer:
    """Room for the stored elements of sparse rows, one row after the other.

    Parameters
    ----------
    indices
        Column of each element, int32 or int64, shape (n_elements,).
    data
        Value of each element, shape (n_elements,), in the dtype that the reader wants.
    """

    indices: NDArray[np.signedinteger]
    data: NDArray[Any]


@dataclass(frozen=True, slots=True)
class DenseBuffer:
    """Room for dense rows.

    Parameters
    ----------
    data
        C-contiguous, shape (n_rows, n_vars), in the dtype that the reader wants.
    """

    data: NDArray[Any]


RowBuffer = CsrBuffer | DenseBuffer


class Source(Protocol):
    """One matrix of cells x genes in storage, with its annotations.

    A source opens its storage lazily in each process, can be pickled, survives fork and spawn,
    and never shares a file handle between processes. One process may call it from one thread
    at a time.
    """

    @property
    def path(self) -> Path:
        """The file or folder, for messages and for the page cache."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells and of genes."""
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

    def var_names(self) -> NDArray[np.object_]:
        """Return the gene names, str, shape (n_vars,)."""
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

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return how many elements each row of ``runs`` stores, shape (n_rows_in_runs,)."""
        ...

    def read_into(self, runs: Runs, out: RowBuffer) -> None:
        """Fill ``out`` with the rows of ``runs``, ascending.

        Parameters
        ----------
        runs
            Ascending, disjoint row runs within the source.
        out
            A buffer of exactly the size that `row_lengths` says: a `CsrBuffer` only from a
            source of CSR layout, a `DenseBuffer` from any. It is filled completely; values
            are cast to its dtype.

        Raises
        ------
        FormatError
            The storage is truncated or damaged; names file, element and range.
        """
        ...
