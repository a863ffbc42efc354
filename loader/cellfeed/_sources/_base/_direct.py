"""Elements whose rows a library decodes directly into the minibatch."""

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CsrRows
from cellfeed._chunks import ChunkReads
from cellfeed._layouts import Layout
from cellfeed._runs import Runs, expand
from cellfeed._sources._base._source import StoredElement

__all__ = ["DirectCsr"]


class DirectCsr(StoredElement):
    """Sparse rows that a library decodes directly into minibatches, in several threads.

    The lengths of rows must be known before they are read.

    Attributes
    ----------
    decodes_to
        Dtypes that the library can decode values to. These include `dtype`, from which values are
        cast to other dtypes.
    is_canonical
        Whether the columns of each row ascend strictly.
    """

    layout: Layout = "csr"
    decodes_to: frozenset[np.dtype[Any]]
    is_canonical: bool = False

    @abstractmethod
    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return how many elements each row of ``runs`` stores, int64, shape (n_rows_in_runs,)."""

    @abstractmethod
    def stored_rows(self, rows: NDArray[np.int64]) -> ChunkReads:
        """Return the byte ranges of rows, for readahead, or to measure reading alone.

        Parameters
        ----------
        rows
            Ascending, int64, shape (n,).
        """

    @abstractmethod
    def decode_rows(
        self, rows: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any]
    ) -> None:
        """Decode rows one after another; several threads call this concurrently.

        Parameters
        ----------
        rows
            Rows in any order, int64, shape (n,).
        indices, data
            Output arrays for the elements of all rows: column indices, int32 or int64, and values,
            of one of `decodes_to`.

        Raises
        ------
        FormatError
            The storage is damaged, or was replaced since it was opened.
        """

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows in this thread."""
        indptr = np.concatenate([[0], np.cumsum(self.row_lengths(runs))])
        indices, data = np.empty(indptr[-1], np.int64), np.empty(indptr[-1], self.dtype)
        self.decode_rows(expand(runs), indices, data)
        return CsrRows(indptr, indices, data, self.shape[1])
