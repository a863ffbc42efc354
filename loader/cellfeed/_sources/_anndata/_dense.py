"""Dense matrices: from chunks where possible, else through the format's library, run by run."""

from typing import Any

from numpy.typing import NDArray

from cellfeed._layouts import ChunkedDense, Layout
from cellfeed._runs import Runs
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._matrix import StoredMatrix, native

__all__ = ["StoredDense"]


class StoredDense(StoredMatrix):
    """A dense matrix of an AnnData file.

    Parameters
    ----------
    file, element, var
        See `StoredMatrix`.
    """

    layout: Layout = "dense"

    def __init__(self, file: AnnDataFile, element: str, var: str | None) -> None:
        super().__init__(file, element, var)
        stored = self._stored
        if stored.ndim != 2 or stored.dtype.kind not in "biuf":  # noqa: PLR2004 - cells x columns
            raise self._inconsistent(
                f"cells x columns of numbers expected, but it has shape {stored.shape} "
                f"and dtype {stored.dtype}"
            )
        self.shape = (int(stored.shape[0]), int(stored.shape[1]))
        self._check_tables(self.shape)
        self.dtype = native(stored.dtype)
        self.rows_per_chunk = float(stored.chunks[0]) if stored.chunks else 1.0
        file.watch(self._array_names)

    def load_tables(self) -> None:
        """Read where chunks lie."""
        self._file.check_unchanged()
        self._chunked_array(self._element)

    def row_lengths(self, runs: Runs) -> None:
        """Return None: how many elements are not zero is known once they have been read."""

    def chunked(self) -> ChunkedDense | None:
        """Return where rows lie, None if only the format's own library can read them."""
        self._file.check_unchanged()
        stored = self._chunked_array(self._element)
        return None if stored is None else ChunkedDense(stored, self.shape[1])

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Return the rows of ``runs``, read through the format's library."""
        self._file.check_unchanged()
        rows = self._read_slices(self._element, runs, runs)
        self._file.check_unchanged()
        return rows
