"""The matrix of a folder of memory maps."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import CsrRows
from cellfeed._chunks import FolderFiles, Pieces, can_cast, pieced_array
from cellfeed._errors import FormatError
from cellfeed._layouts import CsrChunks
from cellfeed._runs import Runs, expand
from cellfeed._sources._base import FileNames, FlatCsr
from cellfeed._sources._memory_maps._arrays import FlatArrays

__all__ = ["MappedCsr"]


class MappedCsr(FlatCsr):
    """Rows of a CSR matrix, which compiled threads read from its files.

    Parameters
    ----------
    folder
        Folder of the files.
    arrays
        Its arrays.
    rows
        First row, and the one after the last.
    names
        Names of the columns, str, shape (n_columns,); None if they have none.
    n_columns
        Number of columns.
    """

    def __init__(
        self,
        folder: Location,
        arrays: FlatArrays,
        rows: tuple[int, int],
        names: NDArray[np.object_] | None,
        n_columns: int,
    ) -> None:
        used = (arrays.indices.path.name, arrays.data.path.name, arrays.indptr.path.name)
        files = FolderFiles(Path(folder), FileNames(*used), len(used))
        super().__init__(files, (rows[1] - rows[0], n_columns), arrays.data.dtype)
        self._location, self._arrays, self._rows, self._names = folder, arrays, rows, names

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        return super().var_names() if self._names is None else self._names

    def stored_bytes(self) -> int:
        """Return the size of its files in bytes, or the share of its rows in them."""
        n_bytes = int(self._files.sizes(np.arange(3)).sum())
        return round(n_bytes * self.shape[0] / max(1, self._arrays.n_rows))

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows in their stored form."""
        chunked = self.chunked()
        if can_cast(chunked.data.dtype, self.dtype):
            return super().read_rows(runs)
        lengths = chunked.ranges(expand(runs))[1]  # of float16
        bounds = chunked.indptr[runs]
        data, indices = (
            np.concatenate([mapped[:0], *(mapped[start:stop] for start, stop in bounds.tolist())])
            for mapped in (self._arrays.data.mapped(), self._arrays.indices.mapped())
        )
        ends = np.concatenate([[0], np.cumsum(lengths)])
        return CsrRows(ends, indices.astype(np.int64), data, chunked.n_columns)

    def _find(self) -> CsrChunks:
        self._files.check_unchanged(np.arange(3))
        first, stop = self._rows
        stored = self._arrays.indptr.mapped()[first : stop + 1]
        as_stored = np.dtype(stored.dtype.newbyteorder("=")) in (np.int64, np.uint64)
        pointer = stored.view(np.int64) if as_stored and stored.dtype.isnative else None
        pointer = stored.astype(np.int64) if pointer is None else pointer
        if np.any(pointer[1:] < pointer[:-1]) or not 0 <= pointer[0] <= pointer[-1]:
            msg = f"{self._location}: `{self._arrays.indptr.path.name}` does not ascend"
            raise FormatError(f"{msg}; it is damaged, copy or write it again")
        arrays = [
            pieced_array(
                array.path.name,
                Pieces(
                    files=np.array([file]),
                    offsets=np.array([array.offset]),
                    sizes=np.array([array.size]),
                    itemsize=array.dtype.itemsize,
                ),
                array.dtype,
                self._files,
            )
            for file, array in enumerate((self._arrays.indices, self._arrays.data))
        ]
        return CsrChunks(pointer, arrays[0], arrays[1], self.shape[1])
