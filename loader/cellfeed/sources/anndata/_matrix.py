"""Base class of CSR and dense elements: column names, chunked arrays and error messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed._runs import Runs, count_rows, expand
from cellfeed.bytes import cancellable_threads
from cellfeed.bytes._tables import Tables, are_many
from cellfeed.decode import ChunkedArray, Decoder, SlowRead, can_cast
from cellfeed.machine import usable_cpu_count
from cellfeed.rows import CsrChunks, CsrRows, DenseChunks, Layout, summable
from cellfeed.sources._source import StoredElement, fill, why_not_cast
from cellfeed.sources.anndata import _annotations as frames
from cellfeed.sources.anndata._file import AnnDataFile, damage_named, table_length


class StoredMatrix(StoredElement):
    """Base class of stored elements: an array of an AnnData file with a row for each cell.

    Parameters
    ----------
    file
        The file.
    element
        Path of the array: ``X``, a layer, ``raw/X``, or one of ``obsm``.
    var
        The table of its genes; None if its columns have no names.
    obs
        The table of its cells.
    """

    _writer = "anndata"  # the program that writes such files, for messages

    def __init__(self, file: AnnDataFile, element: str, var: str | None, obs: str = "obs") -> None:
        self._file, self.location = file, file.location
        self._obs = obs
        self._element = self.stored_as = element
        self._array_names: tuple[str, ...] = (element,)  # of the arrays that contain the rows
        self.var = var
        self._chunked_arrays: dict[str, ChunkedArray | None] = {}
        self._stored_dtype: np.dtype[Any] | None = None  # none where there are no values
        self._slow_read: SlowRead | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_chunked_arrays": {}}

    def described(self) -> dict[str, Any] | None:
        """Return what is known of the element, as JSON; None if that is not all that it needs.

        An element with a twin needs that, and a modality the order of its rows. Why one is read
        slowly may depend on what is installed. These are all attributes: if others are added,
        `_tables._FORMAT` must change.
        """
        own = {
            key: value.str if isinstance(value, np.dtype) else value
            for key, value in self.__getstate__().items()
            if key not in ("_file", "location", "_shares_indices_with")
        }
        needed = self.__dict__.get("_shares_indices_with"), self._slow_read, self.row_order
        return own if all(each is None for each in needed) else None

    @classmethod
    def of_described(cls, file: AnnDataFile, described: Mapping[str, Any]) -> Self:
        """Return the element of `described`, without opening the file."""
        own = object.__new__(cls)
        own.__dict__.update(
            {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in described.items()
            },
            _file=file,
            location=file.location,
            dtype=np.dtype(described["dtype"]),
        )
        if own._stored_dtype is not None:
            own._stored_dtype = np.dtype(own._stored_dtype)
        return own

    def _check_tables(self, shape: tuple[int, ...]) -> None:
        """Check the numbers of cells and genes against the tables, before allocating memory."""
        for table, n, what in ((self._obs, shape[0], "rows"), (self.var, shape[1], "columns")):
            if table is None:
                continue
            with self._damage_named(table):
                found = table_length(self._file, table)
            if found != n:
                msg = f"{self.location}: {table} has {found} rows, but `{self._element}` has {n}"
                raise FormatError(f"{msg} {what}; write the file again with {self._writer}")

    def stored_bytes(self) -> int:
        """Return the size of values and indices in storage, in bytes."""
        with self._damage_named(self._element):
            return sum(self._file.stored_bytes(name) or 0 for name in self._array_names)

    def codec(self) -> str:
        """Return the compression of the values, as text."""
        with self._damage_named(self._element):
            return self._file.codec(self._array_names[-1])

    def _watch(self, values: Any, *, others: Sequence[str] = ()) -> None:
        """Record how arrays are stored, to notice changes, and whether cellfeed can decode them.

        Parameters
        ----------
        values
            The array of values, whose name is the last of the array names.
        others
            Names of further arrays that are read with each row.
        """
        self._file.watch(self._array_names)
        self.chunk_shape = values.chunks and tuple(int(n) for n in values.chunks)
        if values.size:
            self._stored_dtype = native(values.dtype)
            names = [self._array_names[-1], *others]
            self._slow_read = next(filter(None, map(self._file.slow_read, names)), None)

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why cellfeed does not decode values as this dtype; None if it does."""
        if self._slow_read is not None or self._stored_dtype is None:
            return self._slow_read
        return why_not_cast(self._stored_dtype, dtype, self._file.library)

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns, str, shape (n_columns,); numbers without `var`."""
        if self.var is None:
            return super().var_names()
        with self._damage_named(self.var):
            return frames.read_names(self._file, self.var, is_table=True)

    def _is_zero_where_lost(self, name: str) -> bool:  # noqa: ARG002 - of a dense matrix, all are
        """Return whether missing chunks of an array are zero; otherwise they were lost."""
        return True

    def _chunked_array(self, name: str) -> ChunkedArray | None:
        """Return a chunked array; the locations of its chunks are read once."""
        if name not in self._chunked_arrays:
            with self._damage_named(name):
                self._chunked_arrays[name] = self._file.chunked_array(
                    name, lost_is_zero=self._is_zero_where_lost(name)
                )
        return self._chunked_arrays[name]

    def _read_slices(self, name: str, slices: Runs, runs: Runs) -> NDArray[Any]:
        """Read slices of an array through the format's library, one after another.

        Parameters
        ----------
        name
            Path of the array.
        slices
            Ranges along its first dimension, shape (n, 2).
        runs
            The rows that they belong to, for messages.
        """
        with self._damage_named(name, runs):
            stored = self._file.stored(name)
            out = np.empty((count_rows(slices), *stored.shape[1:]), native(stored.dtype))
            return fill(out, slices, lambda start, stop: stored[start:stop])

    def _damage_named(self, element: str, runs: Runs | None = None) -> AbstractContextManager[None]:
        return damage_named(self.location, element, runs, writer=self._writer)

    def _inconsistent(self, what: str) -> FormatError:
        msg = f"{self.location}: `{self._element}` is inconsistent: {what}; write the file again"
        return FormatError(msg)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return ``dtype`` in the machine's byte order."""
    return dtype.newbyteorder("=")


# CSR matrices, read from chunks if possible, else through the format's library, run by run.


class StoredCsr(StoredMatrix):
    """A CSR matrix of an AnnData file.

    The row pointers stay in memory once they are needed: 8 bytes per cell, which all processes
    share if they are large; see `CachedTables`.

    Parameters
    ----------
    file, element, var, obs
        See `StoredMatrix`.
    """

    layout: Layout = "csr"
    _row_pointer: NDArray[np.int64] | None = None
    _unchecked_pointer: NDArray[Any] | None = None  # until they are checked
    _shares_indices_with: StoredCsr | None = None

    def __init__(self, file: AnnDataFile, element: str, var: str | None, obs: str = "obs") -> None:
        super().__init__(file, element, var, obs)
        self._array_names = tuple(f"{element}/{name}" for name in ("indptr", "indices", "data"))
        with self._damage_named(element):
            group = file.stored(element)
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
            is_in_one_chunk = indptr.chunks is not None and indptr.size <= indptr.chunks[0]
            is_in_one_chunk = is_in_one_chunk and not are_many(indptr.size)
            if is_in_one_chunk:  # all of which is decompressed anyway
                self._unchecked_pointer = indptr[:]
                last = int(self._unchecked_pointer[-1])
            else:
                last = int(indptr[-1])
            if last != data.size or indices.size != data.size:
                raise self._inconsistent(
                    f"the row pointers end at {last}, but there are {data.size} values "
                    f"and {indices.size} indices"
                )
            self._check_tables(self.shape)
            if data.chunks is not None and last:
                n_rows = self.shape[0]
                self.rows_per_chunk = min(float(n_rows), data.chunks[0] * n_rows / last)
            self._n_elements = last
            self._watch(data, others=[f"{element}/indices"])
            if self._slow_read is None and data.size and indices.dtype.kind == "f":
                reason = f"its column indices are {indices.dtype}"
                self._slow_read = SlowRead(file.library, reason, "write it as a CSR matrix")

    def share_indices(self, other: StoredCsr) -> None:
        """Use column indices and row pointers of another element, if links make them the same.

        Then a fetch of both decodes them once.
        """
        if self.shape == other.shape and all(
            map(self._file.are_same, self._array_names[:2], other._array_names[:2])
        ):
            self._shares_indices_with = other

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_row_pointer": None, "_unchecked_pointer": None}

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
        return CsrChunks(self._pointer(), indices, data, self._n_stored_columns)

    def read_rows(self, runs: Runs) -> CsrRows:
        """Return the rows of ``runs``, read by the format's library."""
        self._file.check_unchanged()
        ranges, lengths = self._pointer()[runs], self.row_lengths(runs)
        indices = self._integers("indices", self._read_slices(self._array_names[1], ranges, runs))
        data = self._read_slices(f"{self._element}/data", ranges, runs)
        n_columns = self._n_stored_columns
        if indices.size and not 0 <= indices.min() <= indices.max() < n_columns:
            raise self._inconsistent(f"a column index is outside [0, {n_columns})")
        self._check_none_is_lost(indices)
        self._file.check_unchanged()
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        return CsrRows(indptr, indices, data, n_columns)

    @property
    def _n_stored_columns(self) -> int:
        return self.shape[1] if self.stored_columns is None else self.stored_columns.size

    def _check_none_is_lost(self, indices: NDArray[Any]) -> None:
        """Check that no chunk is missing, since the format's library would read it as zeros."""
        n_lost = self._file.n_lost(f"{self._element}/data")
        name = self._array_names[1]
        if not n_lost and not self._is_zero_where_lost(name) and (indices == 0).any():
            n_lost = self._file.n_lost(name)
        self._refuse_lost(n_lost)

    def _refuse_lost(self, n_lost: int) -> None:
        if n_lost:
            msg = (
                f"{self.location}: `{self._element}`: {n_lost} of its chunks or shards are "
                "missing; copy or download it again or, if these are zeros that were never "
                "written, write them too"
            )
            raise FormatError(msg)

    def _chunked(self, name: str) -> ChunkedArray | None:
        if self._shares_indices_with is not None and name != "data":
            return self._shares_indices_with._chunked(name)  # noqa: SLF001 - of the same class
        return self._chunked_array(f"{self._element}/{name}")

    def _is_zero_where_lost(self, name: str) -> bool:
        # Values that are stored are not zero, but row pointers are until a cell has elements, and
        # so is the index of the only gene.
        return name.endswith("/indptr") or (
            name.endswith("/indices") and self._n_stored_columns == 1
        )

    def _shape_of(self, group: Any) -> tuple[int, int]:
        stored = group.attrs.get("shape")
        stored = group.attrs.get("h5sparse_shape") if stored is None else stored
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
        if self._shares_indices_with is not None:
            return self._shares_indices_with._pointer()  # noqa: SLF001 - of the same class
        if self._row_pointer is None:
            name = f"{self._element}/indptr"
            what = f"row pointer of {self.shape[0]} rows to {self._n_elements}"

            def cached() -> Tables:
                if not are_many(self.shape[0]):
                    return self._checked_pointer()
                tables = self._file.table_cache(name)
                return tables.get(what, self.shape[0], self._checked_pointer)

            self._row_pointer = self._file.recorded(f"{name}: {what}", cached)["pointer"]
            self._unchecked_pointer = None
        return self._row_pointer

    def _checked_pointer(self) -> Tables:
        pointer = self._read_pointer()
        if (
            pointer.size != self.shape[0] + 1
            or (pointer[0], pointer[-1]) != (0, self._n_elements)
            or np.any(pointer[1:] < pointer[:-1])
        ):
            raise self._inconsistent(f"the row pointers do not ascend from 0 to {self._n_elements}")
        if np.max(np.diff(pointer), initial=0) > self._n_stored_columns:
            # The row after pointers that are missing would get the elements of their rows.
            self._refuse_lost(self._file.n_lost(self._array_names[0]))
        return {"pointer": pointer}

    def _read_pointer(self) -> NDArray[np.int64]:
        if self._unchecked_pointer is not None:
            return self._integers("indptr", self._unchecked_pointer)
        stored = self._chunked("indptr")
        with self._damage_named(f"{self._element}/indptr"):
            if stored is None or not _are_integers(stored):
                return self._integers("indptr", self._file.stored(self._array_names[0])[:])
            pointer = np.empty(stored.shape[0], np.int64)
            first, count = np.zeros(1, np.int64), np.array([pointer.size], np.int64)
            reads = stored.reads_of_ranges(first, count, first, pointer.dtype)
            num_threads = max(1, min(reads.n_chunks, usable_cpu_count()))
            with cancellable_threads(num_threads, "cellfeed-tables") as threads:
                reads.run(np.array([pointer.ctypes.data], np.int64), Decoder(threads, num_threads))
            return pointer


# Dense arrays, read from chunks if possible, else through the format's library, run by run.


class StoredDense(StoredMatrix):
    """A dense array of an AnnData file; one with a single dimension is one column.

    Parameters
    ----------
    file, element, var, obs
        See `StoredMatrix`.
    """

    layout: Layout = "dense"

    def __init__(self, file: AnnDataFile, element: str, var: str | None, obs: str = "obs") -> None:
        super().__init__(file, element, var, obs)
        stored = file.stored(element)
        if stored.ndim < 1 or stored.dtype.kind not in "biuf":
            raise self._inconsistent(
                f"expected numbers of shape cells x columns, but it has shape {stored.shape} and "
                f"dtype {stored.dtype}"
            )
        shape = tuple(int(n) for n in stored.shape)
        self.shape = shape if len(shape) > 1 else (*shape, 1)  # a column, as anndata takes it
        self._n_columns = math.prod(self.shape[1:])
        self._check_tables(self.shape)
        self.dtype = native(stored.dtype)
        self.rows_per_chunk = float(stored.chunks[0]) if stored.chunks else 1.0
        self._watch(stored)

    def load_tables(self) -> None:
        """Read the locations of chunks."""
        self.chunked()

    def chunked(self) -> DenseChunks | None:
        """Return the chunks of the rows; None if only the format's own library can read them."""
        self._file.check_unchanged()
        stored = self._chunked_array(self._element)
        return None if stored is None else DenseChunks(stored, self._n_columns)

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Return the rows of ``runs``, read by the format's library."""
        self._file.check_unchanged()
        rows = self._read_slices(self._element, runs, runs)
        self._file.check_unchanged()
        return rows.reshape(len(rows), *self.shape[1:])


def _are_integers(stored: ChunkedArray) -> bool:
    """Return whether integers are stored as such, in a dtype that cellfeed decodes."""
    return stored.dtype.kind in "iu" and can_cast(stored.dtype, np.dtype(np.int64))
