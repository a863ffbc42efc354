"""Base class of CSR and dense elements: column names, chunked arrays and error messages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._chunks import ChunkedArray, SlowRead, can_cast
from cellfeed._errors import FormatError
from cellfeed._runs import Runs, count_rows
from cellfeed._sources._anndata import _annotations as frames
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._base import StoredElement

__all__ = ["StoredMatrix", "native"]


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

    def __init__(self, file: AnnDataFile, element: str, var: str | None, obs: str = "obs") -> None:
        self._file = file
        self._obs = obs
        self._element = self.stored_as = element
        self.var = var
        self._chunked_arrays: dict[str, ChunkedArray | None] = {}
        self._stored_dtype: np.dtype[Any] | None = None  # none where there are no values
        self._slow_read: SlowRead | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_chunked_arrays": {}}

    @property
    def location(self) -> Location:
        """The file."""
        return self._file.location

    @property
    def _array_names(self) -> tuple[str, ...]:
        """Paths of the arrays that contain the rows."""
        return (self._element,)

    @property
    def _stored(self) -> Any:
        return self._file.stored(self._element)

    def _check_tables(self, shape: tuple[int, ...]) -> None:
        """Check the numbers of cells and genes against the tables, before allocating memory."""
        for table, n, what in ((self._obs, shape[0], "rows"), (self.var, shape[1], "columns")):
            if table is None:
                continue
            with self._damage_named(table):
                found = frames.count_rows(self._file, table)
            if found != n:
                msg = (
                    f"{self.location}: {table} has {found} rows, but `{self._element}` has {n} "
                    f"{what}; write the file again with anndata"
                )
                raise FormatError(msg)

    def stored_bytes(self) -> int:
        """Return the size of values and indices in storage, in bytes."""
        with self._damage_named(self._element):
            return sum(self._file.stored_bytes(name) for name in self._array_names)

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
        stored = self._stored_dtype
        if self._slow_read is not None or stored is None or can_cast(stored, dtype):
            return self._slow_read
        reason = f"cellfeed does not convert {stored} to {dtype}"
        remedy = f"read it as {stored}, or write it as {dtype}"
        return SlowRead(self._file.library, reason, remedy)

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns, str, shape (n_columns,); numbers without `var`."""
        if self.var is None:
            return np.array([str(column) for column in range(self.shape[1])], object)
        with self._damage_named(self.var):
            return frames.read_row_names(self._file, self.var, are_shared=True)

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
            filled = 0
            for start, stop in slices.tolist():
                out[filled : filled + stop - start] = stored[start:stop]
                filled += stop - start
        return out

    @contextmanager
    def _damage_named(self, element: str, runs: Runs | None = None) -> Iterator[None]:
        with damage_named(self.location, element, runs):
            yield

    def _inconsistent(self, what: str) -> FormatError:
        msg = f"{self.location}: `{self._element}` is inconsistent: {what}; write the file again"
        return FormatError(msg)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return ``dtype`` in the machine's byte order."""
    return dtype.newbyteorder("=")
