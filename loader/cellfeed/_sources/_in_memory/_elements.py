"""Matrices in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import CsrRows
from cellfeed._chunks import can_cast
from cellfeed._errors import FormatError
from cellfeed._layouts import CsrChunks, DenseChunks, Layout
from cellfeed._lazy import sp
from cellfeed._runs import Runs, expand
from cellfeed._sources._base import StoredElement
from cellfeed._sources._in_memory._memory import array_in_memory

__all__ = ["DenseInMemory", "SparseInMemory", "element_in_memory"]


def element_in_memory(
    location: Location, name: str, matrix: Any, columns: NDArray[np.object_] | None
) -> StoredElement:
    """Return a matrix as an element.

    Parameters
    ----------
    location, name
        For messages.
    matrix
        CSR, or a NumPy array of numbers.
    columns
        Names of its columns, str; None if they have none.

    Raises
    ------
    FormatError
        It is neither.
    """
    if sp.issparse(matrix):
        kind: str = getattr(matrix, "format", "sparse")
        if kind != "csr":
            msg = f"{location}: `{name}` is stored by gene ({kind}), which is slow by cell"
            raise FormatError(f"{msg}; make it CSR with `.tocsr()`")
        return SparseInMemory(location, name, matrix, columns)
    if not isinstance(matrix, np.ndarray) or matrix.ndim < 2 or matrix.dtype.kind not in "biuf":  # noqa: PLR2004 - cells, columns
        msg = f"{location}: `{name}` is a {type(matrix).__name__}, not a matrix of numbers"
        raise FormatError(f"{msg}; make it a NumPy array or CSR")
    return DenseInMemory(location, name, matrix, columns)


class _InMemory(StoredElement):
    def __init__(
        self, location: Location, name: str, matrix: Any, columns: NDArray[np.object_] | None
    ) -> None:
        self._location, self._name, self._columns = location, name, columns
        self.var = None if columns is None else "raw/var" if name == "raw/X" else "var"
        self.shape = tuple(int(n) for n in matrix.shape)
        self.dtype = matrix.dtype.newbyteorder("=")

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        return super().var_names() if self._columns is None else self._columns

    def codec(self) -> str:
        """Return that nothing is compressed."""
        return "none"

    def _array(self, values: NDArray[Any]) -> Any:
        return array_in_memory(self._location, self._name, values)


class SparseInMemory(_InMemory):
    """A CSR matrix of SciPy."""

    layout: Layout = "csr"

    def __init__(
        self, location: Location, name: str, matrix: Any, columns: NDArray[np.object_] | None
    ) -> None:
        super().__init__(location, name, matrix, columns)
        self._matrix = matrix
        arrays = matrix.indices, matrix.data
        is_plain = all(each.flags.c_contiguous and each.dtype.isnative for each in arrays)
        self._chunks: CsrChunks | None = None
        if is_plain and can_cast(matrix.data.dtype, self.dtype):
            pointer = np.asarray(matrix.indptr, np.int64)
            chunked = [self._array(each) for each in arrays]
            self._chunks = CsrChunks(pointer, chunked[0], chunked[1], self.shape[1])

    def stored_bytes(self) -> int:
        """Return its size in memory, in bytes."""
        parts = (self._matrix.data, self._matrix.indices, self._matrix.indptr)
        return sum(int(each.nbytes) for each in parts)

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of elements of each row."""
        rows = expand(runs)
        pointer = self._matrix.indptr
        return np.asarray(pointer[rows + 1] - pointer[rows], np.int64)

    def chunked(self) -> CsrChunks | None:
        """Return where rows lie."""
        return self._chunks

    def read_rows(self, runs: Runs) -> CsrRows:
        """Return rows."""
        rows = self._matrix[expand(runs)]
        return CsrRows(rows.indptr, rows.indices, rows.data, self.shape[1])


class DenseInMemory(_InMemory):
    """A NumPy array."""

    layout: Layout = "dense"

    def __init__(
        self, location: Location, name: str, matrix: Any, columns: NDArray[np.object_] | None
    ) -> None:
        super().__init__(location, name, matrix, columns)
        self._matrix = matrix
        self._chunks: DenseChunks | None = None
        is_plain = matrix.flags.c_contiguous and matrix.dtype.isnative
        if is_plain and matrix.size and can_cast(matrix.dtype, self.dtype):
            self._chunks = DenseChunks(self._array(matrix), matrix.size // len(matrix))

    def stored_bytes(self) -> int:
        """Return its size in memory, in bytes."""
        return int(self._matrix.nbytes)

    def chunked(self) -> DenseChunks | None:
        """Return where rows lie."""
        return self._chunks

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Return rows."""
        rows: NDArray[Any] = self._matrix[expand(runs)]
        return rows.astype(self.dtype, copy=False)
