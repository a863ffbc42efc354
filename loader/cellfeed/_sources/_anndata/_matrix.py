"""What CSR and dense elements share: names of columns, chunked arrays, and words for damage."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkedArray
from cellfeed._errors import FormatError
from cellfeed._runs import Runs, count_rows
from cellfeed._sources._anndata import _annotations as annotations
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._base import StoredElement

__all__ = ["StoredMatrix", "native"]


class StoredMatrix(StoredElement):
    """Base of the stored elements: one array of one AnnData file with a row for each cell.

    Parameters
    ----------
    file
        Where it is stored.
    element
        The array: ``X``, a layer, that of ``raw``, or one of ``obsm``.
    var
        The table of its genes, None if its columns have no names.
    """

    def __init__(self, file: AnnDataFile, element: str, var: str | None) -> None:
        self._file = file
        self._element = self.stored_as = element
        self.var = var
        self._chunked_arrays: dict[str, ChunkedArray | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_chunked_arrays": {}}

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def _array_names(self) -> tuple[str, ...]:
        """Paths of the arrays that rows lie in."""
        return (self._element,)

    @property
    def _stored(self) -> Any:
        return self._file()[self._element]

    def _check_tables(self, shape: tuple[int, int]) -> None:
        """Check that cells and genes are those of the tables, before memory is taken for them."""
        for table, n, what in (("obs", shape[0], "rows"), (self.var, shape[1], "columns")):
            if table is None:
                continue
            with self._damage_named(table):
                found = annotations.count_rows(self._file()[table])
            if found != n:
                msg = (
                    f"{self.path}: {table} has {found} rows, `{self._element}` {n} {what}; "
                    "write the file anew with anndata"
                )
                raise FormatError(msg)

    def stored_bytes(self) -> int:
        """Return how many bytes the values, and where they are, take in storage."""
        with self._damage_named(self._element):
            return sum(self._file.stored_bytes(name) for name in self._array_names)

    def codec(self) -> str:
        """Return how the values are compressed, in words."""
        with self._damage_named(self._element):
            return self._file.codec(self._array_names[-1])

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns, str, shape (n_columns,); their numbers without `var`."""
        if self.var is None:
            return np.array([str(column) for column in range(self.shape[1])], object)
        with self._damage_named(self.var):
            return annotations.read_var_names(self._file, self.var)

    def _is_zero_where_lost(self, name: str) -> bool:  # noqa: ARG002 - of a dense matrix, all are
        """Return whether chunks of an array that are not there are zero; else they were lost."""
        return True

    def _chunked_array(self, name: str) -> ChunkedArray | None:
        """Return an array as chunks; where they lie is read once."""
        if name not in self._chunked_arrays:
            with self._damage_named(name):
                self._chunked_arrays[name] = self._file.chunked_array(
                    name, lost_is_zero=self._is_zero_where_lost(name)
                )
        return self._chunked_arrays[name]

    def _read_slices(self, name: str, slices: Runs, runs: Runs) -> NDArray[Any]:
        """Read slices of an array through the format's library, one after the other.

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
            stored = self._file.array(name)
            out = np.empty((count_rows(slices), *stored.shape[1:]), native(stored.dtype))
            filled = 0
            for start, stop in slices.tolist():
                out[filled : filled + stop - start] = stored[start:stop]
                filled += stop - start
        return out

    @contextmanager
    def _damage_named(self, element: str, runs: Runs | None = None) -> Iterator[None]:
        with damage_named(self.path, element, runs):
            yield

    def _inconsistent(self, what: str) -> FormatError:
        msg = f"{self.path}: `{self._element}` is inconsistent: {what}; write the file anew"
        return FormatError(msg)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return ``dtype`` in the machine's byte order."""
    return dtype.newbyteorder("=")
