"""Data frames of numbers, such as in obsm, read completely, once in each process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed._layouts import Layout
from cellfeed._lazy import pd
from cellfeed._runs import Runs, expand
from cellfeed._sources._anndata import _annotations as frames
from cellfeed._sources._anndata._attributes import is_group, text
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._matrix import StoredMatrix, native

__all__ = ["StoredFrame"]

_NULLABLE = {"nullable-integer", "nullable-boolean"}


class StoredFrame(StoredMatrix):
    """A data frame of an AnnData file as a dense matrix with the same columns.

    Columns are stored one by one, so the whole frame is read at its first use. Columns that can
    have missing values are read as float64, with NaN for missing values. Rows are matched with
    cells by name, unless the rows are only numbered.

    Parameters
    ----------
    file, element, obs
        See `StoredMatrix`; columns keep their names.

    Raises
    ------
    FormatError
        A column is neither numeric nor boolean, or the rows are those of other cells.
    """

    layout: Layout = "dense"
    rows_per_chunk = 1.0

    def __init__(self, file: AnnDataFile, element: str, obs: str = "obs") -> None:
        super().__init__(file, element, None, obs)
        self._names = frames.obs_names(file, element)
        dtypes = {name: _dtype(file.stored(f"{element}/{name}")) for name in self._names}
        others = [name for name, dtype in dtypes.items() if dtype is None]
        if others:
            msg = (
                f"{self.location}: the data frame `{element}` has columns that are neither "
                f"numbers nor booleans: {', '.join(map(repr, others))}; write it without them, or "
                "with their codes"
            )
            raise FormatError(msg)
        known = [dtype for dtype in dtypes.values() if dtype is not None]
        self.dtype = np.result_type(*known) if known else np.dtype(np.float64)
        self.shape = (frames.count_rows(file, element), len(self._names))
        self._check_tables(self.shape)
        self._order = self._rows_of_cells()
        self.var = element
        self._values: NDArray[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_values": None}

    @property
    def _array_names(self) -> tuple[str, ...]:
        names = list[str]()
        for name in self._names:
            column = f"{self._element}/{name}"
            is_nullable = is_group(self._file.stored(column))
            names += [f"{column}/values", f"{column}/mask"] if is_nullable else [column]
        return tuple(names)

    def codec(self) -> str:
        """Return the compression of the values, as text."""
        return super().codec() if self._names else "none"

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns, str, shape (n_columns,)."""
        return np.array(self._names, object)

    def load_tables(self) -> None:
        """Read the frame."""
        self._all_rows()

    def row_lengths(self, runs: Runs) -> None:
        """Return None, since the numbers of non-zero elements are unknown before reading."""

    def chunked(self) -> None:
        """Return None, since columns are not chunks of rows."""

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Return the rows of ``runs``."""
        rows: NDArray[Any] = self._all_rows()[expand(runs)]
        return rows

    def _all_rows(self) -> NDArray[Any]:
        self._file.check_unchanged()
        if self._values is None:
            values = np.empty(self.shape, self.dtype)
            for k, name in enumerate(self._names):
                with self._damage_named(f"{self._element}/{name}"):
                    column = self._file.read(f"{self._element}/{name}")
                    if hasattr(column, "to_numpy"):  # nullable, of pandas
                        column = column.to_numpy(dtype=np.float64, na_value=np.nan)
                    values[:, k] = column
            self._file.check_unchanged()
            self._values = values if self._order is None else values[self._order]
        return self._values

    def _rows_of_cells(self) -> NDArray[np.int64] | None:
        """Return the row of each cell by its name; None if rows are in the order of the cells."""
        with self._damage_named(self._element):
            rows = frames.read_row_names(self._file, self._element, are_shared=False)
        with self._damage_named(self._obs):
            cells = frames.read_row_names(self._file, self._obs, are_shared=False)
        if np.array_equal(rows, cells):
            return None
        index = pd.Index(rows, dtype=object)
        order = (
            index.get_indexer(pd.Index(cells, dtype=object))
            if index.is_unique
            else np.full(cells.size, -1)
        )
        if len(order) and not np.array_equal(np.sort(order), np.arange(rows.size)):
            if any(np.array_equal(rows, np.arange(n, rows.size + n).astype(str)) for n in (0, 1)):
                return None
            n_other = int(np.count_nonzero(~np.isin(cells.astype(str), rows.astype(str))))
            other = f"{n_other:,} of its cells" if n_other else "cells whose names are not distinct"
            msg = (
                f"{self.location}: the data frame `{self._element}` has other row names than "
                f"{self._obs}, and none for {other}; write it with `adata.obs_names` as its index"
            )
            raise FormatError(msg)
        return order.astype(np.int64)


def _dtype(column: Any) -> np.dtype[Any] | None:
    """Return the dtype for reading a column; None if it is neither numeric nor boolean."""
    if not is_group(column):
        is_number = column.dtype.kind in "biuf" and "categories" not in column.attrs
        return native(column.dtype) if is_number else None
    return np.dtype(np.float64) if text(column, "encoding-type") in _NULLABLE else None
