"""Sparse rows in uncompressed arrays in local files."""

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import summable
from cellfeed._chunks import FolderFiles, SlowRead
from cellfeed._layouts import CsrChunks
from cellfeed._sources._base._chunked import ChunkedCsr, why_not_cast

__all__ = ["FileNames", "FlatCsr"]


class FileNames:
    """Names of files in a folder, by number; see `FolderFiles`.

    Parameters
    ----------
    names
        The names, in order.
    """

    def __init__(self, *names: str) -> None:
        self._names = np.array([name.encode() for name in names], np.bytes_)

    def __call__(self, files: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """Return the names of the files with these numbers."""
        return self._names[files]


class FlatCsr(ChunkedCsr):
    """Sparse rows in uncompressed arrays, which are located when rows are first read.

    Parameters
    ----------
    files
        The files of the arrays.
    shape
        Number of cells and of genes.
    dtype
        Dtype of the stored values.
    """

    def __init__(self, files: FolderFiles, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        self._files = files
        self.shape = shape
        self.dtype = summable(dtype)
        self._stored_dtype = dtype
        self._found: CsrChunks | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None}

    def codec(self) -> str:
        """Return "none", since nothing is compressed."""
        return "none"

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why cellfeed does not decode values as this dtype; None if it does."""
        return why_not_cast(self._stored_dtype, dtype)

    def load_tables(self) -> None:
        """Read the row pointers."""
        self.chunked()

    def chunked(self) -> CsrChunks:
        """Return the location of the rows."""
        if self._found is None:
            self._found = self._find()
        return self._found

    @abstractmethod
    def _find(self) -> CsrChunks:
        """Return the location of the rows, read from storage."""
