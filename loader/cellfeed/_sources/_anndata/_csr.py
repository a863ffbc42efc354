"""CSR matrices, read from chunks if possible, else through the format's library, run by run."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import threads_until_left
from cellfeed._cells import CsrRows, summable
from cellfeed._chunks import ChunkedArray, Decoder, SlowRead, can_cast
from cellfeed._errors import FormatError
from cellfeed._layouts import CsrChunks, Layout
from cellfeed._runs import Runs, expand
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._matrix import StoredMatrix, native
from cellfeed._tables import Tables
from cellfeed.machine import usable_cpu_count

__all__ = ["StoredCsr"]


class StoredCsr(StoredMatrix):
    """A CSR matrix of an AnnData file.

    The row pointers are kept in memory once they are needed: 8 bytes per cell, which all processes
    share if they are large; see `KeptTables`.

    Parameters
    ----------
    file, element, var, obs
        See `StoredMatrix`.
    """

    layout: Layout = "csr"

    def __init__(self, file: AnnDataFile, element: str, var: str | None, obs: str = "obs") -> None:
        super().__init__(file, element, var, obs)
        with self._damage_named(element):
            group = self._stored
            indptr, indices, data = map(self._file.stored, self._array_names)
            # R writes large integers as floats.
            for stored, kinds in ((data, "biuf"), (indices, "iuf"), (indptr, "iuf")):
                if stored.ndim != 1 or stored.dtype.kind not in kinds:
                    what = "numbers" if "b" in kinds else "integers"
                    raise self._inconsistent(
                        f"{stored.name} is not an array of {what}, but has shape {stored.shape} "
                        f"and dtype {stored.dtype}"
                    )
            self.shape = self._shape_of(group)
            self.dtype = summable(native(data.dtype))
            if indptr.size != self.shape[0] + 1:
                raise self._inconsistent(f"{self.shape[0]} rows but {indptr.size} row pointers")
            last = int(indptr[-1])
            if last != data.size or indices.size != data.size:
                raise self._inconsistent(
                    f"the row pointers end at {last}, but there are {data.size} values "
                    f"and {indices.size} indices"
                )
            self._check_tables(self.shape)
            self.rows_per_chunk = _rows_per_chunk(self.shape[0], data.size, data.chunks)
            self._n_elements = last
            self._watch(data, others=[f"{element}/indices"])
            if self._slow_read is None and data.size and indices.dtype.kind == "f":
                reason = f"its column indices are {indices.dtype}"
                self._slow_read = SlowRead(file.library, reason, "write it as a CSR matrix")
        self._row_pointer: NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_row_pointer": None}

    @property
    def _array_names(self) -> tuple[str, ...]:
        """Paths of the arrays that contain the rows."""
        return tuple(f"{self._element}/{name}" for name in ("indptr", "indices", "data"))

    def load_tables(self) -> None:
        """Read the row pointers and the locations of chunks."""
        self._file.check_unchanged()
        self._pointer()
        for name in ("indices", "data"):
            self._chunked(name)

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of non-zeros of each row."""
        rows = expand(runs)
        pointer = self._pointer()
        return pointer[rows + 1] - pointer[rows]

    def chunked(self) -> CsrChunks | None:
        """Return the chunks of the rows; None if only the format's own library can read them."""
        self._file.check_unchanged()
        indices, data = self._chunked("indices"), self._chunked("data")
        if indices is None or data is None or not _are_integers(indices):
            return None
        return CsrChunks(self._pointer(), indices, data, self.shape[1])

    def read_rows(self, runs: Runs) -> CsrRows:
        """Return the rows of ``runs``, read by the format's library."""
        self._file.check_unchanged()
        ranges, lengths = self._pointer()[runs], self.row_lengths(runs)
        indices = self._integers("indices", self._read_slices(self._array_names[1], ranges, runs))
        data = self._read_slices(f"{self._element}/data", ranges, runs)
        if indices.size and not 0 <= indices.min() <= indices.max() < self.shape[1]:
            raise self._inconsistent(f"a column index is outside [0, {self.shape[1]})")
        self._check_none_is_lost(indices, lengths.size)
        self._file.check_unchanged()
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        return CsrRows(indptr, indices, data, self.shape[1])

    def _check_none_is_lost(self, indices: NDArray[Any], n_rows: int) -> None:
        """Check that no chunk is missing, since the format's library would read it as zeros."""
        n_lost = self._file.n_lost(f"{self._element}/data")
        # Indices may be zero, but only once in a row.
        if not n_lost and np.count_nonzero(indices == 0) > n_rows:
            n_lost = self._file.n_lost(f"{self._element}/indices")
        if n_lost:
            msg = (
                f"{self.location}: `{self._element}`: {n_lost} of its chunks or shards are "
                "missing; copy or download it again or, if these are zeros that were never "
                "written, write them too"
            )
            raise FormatError(msg)

    def _chunked(self, name: str) -> ChunkedArray | None:
        return self._chunked_array(f"{self._element}/{name}")

    def _is_zero_where_lost(self, name: str) -> bool:
        # Values that are stored are not zero, but row pointers are until a cell has elements, and
        # so is the index of the only gene.
        return name.endswith("/indptr") or (name.endswith("/indices") and self.shape[1] == 1)

    def _shape_of(self, group: Any) -> tuple[int, int]:
        stored = group.attrs.get("shape", group.attrs.get("h5sparse_shape"))
        sizes = np.asarray(() if stored is None else stored).ravel()
        if sizes.size != 2 or sizes.dtype.kind not in "iuf":  # noqa: PLR2004 - rows and columns
            raise self._inconsistent(f"its attribute `shape` is not two numbers, but {stored!r}")
        n_rows, n_vars = self._integers("shape", sizes).tolist()
        return n_rows, n_vars

    def _integers(self, name: str, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return integers that may be stored as floats."""
        with np.errstate(invalid="ignore"):
            integers = values.astype(np.int64)
        if values.dtype.kind == "f" and not np.array_equal(integers, values):
            raise self._inconsistent(f"`{name}` has values that are not integers")
        return integers

    def _pointer(self) -> NDArray[np.int64]:
        if self._row_pointer is None:
            tables = self._file.kept_tables(f"{self._element}/indptr").get(
                f"row pointer of {self.shape[0]} rows to {self._n_elements}",
                self.shape[0],
                self._checked_pointer,
            )
            self._row_pointer = tables["pointer"]
        return self._row_pointer

    def _checked_pointer(self) -> Tables:
        pointer = self._read_pointer()
        if (
            pointer.size != self.shape[0] + 1
            or (pointer[0], pointer[-1]) != (0, self._n_elements)
            or np.any(pointer[1:] < pointer[:-1])
        ):
            raise self._inconsistent(f"the row pointers do not ascend from 0 to {self._n_elements}")
        return {"pointer": pointer}

    def _read_pointer(self) -> NDArray[np.int64]:
        stored = self._chunked("indptr")
        with self._damage_named(f"{self._element}/indptr"):
            if stored is None or not _are_integers(stored):
                return self._integers("indptr", self._file.stored(self._array_names[0])[:])
            pointer = np.empty(stored.shape[0], np.int64)
            first, count = np.zeros(1, np.int64), np.array([pointer.size], np.int64)
            reads = stored.reads_of_ranges(first, count, first, pointer.dtype)
            n_threads = max(1, min(reads.n_chunks, usable_cpu_count()))
            with threads_until_left(n_threads, "cellfeed-tables") as threads:
                reads.run(np.array([pointer.ctypes.data], np.int64), Decoder(threads, n_threads))
            return pointer


def _are_integers(stored: ChunkedArray) -> bool:
    """Return whether integers are stored as such, in a dtype that cellfeed decodes."""
    return stored.dtype.kind in "iu" and can_cast(stored.dtype, np.dtype(np.int64))


def _rows_per_chunk(n_rows: int, n_elements: int, chunks: tuple[int, ...] | None) -> float:
    if chunks is None or n_elements == 0:
        return 1.0
    return min(float(n_rows), chunks[0] * n_rows / n_elements)
