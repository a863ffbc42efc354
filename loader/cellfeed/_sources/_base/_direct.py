"""Elements whose rows a library decodes straight into memory that it is given."""

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
    """Sparse rows that a library decodes to where they go, in many threads at once.

    Their lengths are known before, so that they are written into the minibatch that they leave in.

    Attributes
    ----------
    decodes_to
        Dtypes of values that it decodes to; any other is cast from `dtype`, which is one of them.
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
        """Return the bytes of rows, to be announced to the system, or read and nothing else.

        Parameters
        ----------
        rows
            Ascending, int64, shape (n,).
        """

    @abstractmethod
    def decode_rows(
        self, rows: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any]
    ) -> None:
        """Decode rows one after the other; called by many threads at once.

        Parameters
        ----------
        rows
            In any order, int64, shape (n,).
        indices, data
            Where their elements go, int32 or int64, and one of `decodes_to`; as many as the
            rows have.

        Raises
        ------
        FormatError
            The storage is damaged, or is not the one that was opened.
        """

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows with this thread alone."""
        indptr = np.concatenate([[0], np.cumsum(self.row_lengths(runs))])
        indices, data = np.empty(indptr[-1], np.int64), np.empty(indptr[-1], self.dtype)
        self.decode_rows(expand(runs), indices, data)
        return CsrRows(indptr, indices, data, self.shape[1])
