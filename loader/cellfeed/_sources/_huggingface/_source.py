"""`HuggingFaceSource`: datasets with a row for each cell, and its genes in two lists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import (
    ColumnError,
    FormatError,
    ParameterError,
    require_integer,
    require_positive,
)
from cellfeed._lazy import pd
from cellfeed._sources._base import Source, StoredElement, import_arrow
from cellfeed._sources._huggingface._batches import EXTRA, type_of_lists
from cellfeed._sources._huggingface._elements import ArrowLists, ArrowRows, Columns
from cellfeed._sources._huggingface._tables import ArrowTable

__all__ = ["HuggingFaceSource"]

_MOST_IDS = 1 << 20  # only gene numbers below it may be left out; their table takes 4 MB

_LEFT_OUT, _NOT_THERE = -1, -2  # stands for columns that are not in the element


class HuggingFaceSource(Source):
    """A HuggingFace dataset with a row for each cell and its genes in two lists.

    One list has the numbers of the expressed genes, and the other one their values, as in
    Tahoe-100M. All other columns of numbers and text are obs columns. Compiled threads read
    uncompressed Arrow files, the kind that the ``datasets`` library writes, without the library.

    Parameters
    ----------
    dataset
        A folder that ``Dataset.save_to_disk`` wrote, or a ``datasets.Dataset``.
    n_vars
        Number of genes, if gene numbers are columns of the matrix, from 0. Without ``n_vars`` and
        ``gene_ids``, all gene numbers are read first, and this is the largest plus one.
    gene_ids
        Gene number of each column of the matrix, distinct, shape (n_vars,), such as the token ids
        of Tahoe-100M. Elements with other numbers are left out, such as the marker at the beginning
        of each cell of Tahoe-100M; rows are then read in two passes.
    n_markers
        Number of elements at the beginning of each cell's lists that are not genes, if known; 1 for
        Tahoe-100M. They are left out, and all other elements must be of ``gene_ids``, so rows are
        read in one pass, several times faster.
    var_names
        Names of the genes, shape (n_vars,); by default, ``gene_ids`` or the column numbers.
    genes, values
        Names of the columns with the two lists.

    Raises
    ------
    PathError
        There is no such folder.
    FormatError
        The folder is something else, or a column is not a list of numbers. Also when rows are read:
        the lists of a cell differ in length, or a gene number is not below ``n_vars`` or not among
        ``gene_ids``.
    ColumnError
        There is no such column.
    ParameterError
        ``gene_ids`` are not distinct integers, or the number of names is not the number of genes.

    Examples
    --------
    >>> import datasets
    >>> from cellfeed import HuggingFaceSource, open_collection
    >>> columns = {"genes": [[1, 5, 9], [1, 9]], "expressions": [[-2.0, 3.0, 4.0], [-2.0, 7.0]]}
    >>> source = HuggingFaceSource(datasets.Dataset.from_dict(columns), gene_ids=[9, 7, 5])
    >>> open_collection(source)[[1, 0]].X.toarray()
    array([[7., 0., 0.],
           [4., 0., 3.]])
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Any,
        *,
        n_vars: int | None = None,
        gene_ids: ArrayLike | None = None,
        n_markers: int | None = None,
        var_names: Sequence[str] | None = None,
        genes: str = "genes",
        values: str = "expressions",
    ) -> None:
        self._table = ArrowTable(dataset)
        self.location = self._table.location
        self._lists = genes, values
        ids = None if gene_ids is None else _distinct(gene_ids)
        schema = self._table().schema
        for name in self._lists:
            if name not in schema.names:
                msg = f"{self.location}: has no column {name!r}; give `genes=` and `values=` to"
                raise ColumnError(f"{msg} `HuggingFaceSource`, from: {', '.join(schema.names)}")
        arrow = import_arrow(self.location, EXTRA)
        dtypes = [
            np.dtype(type_of_lists(arrow, self.location, schema, name).value_type.to_pandas_dtype())
            for name in self._lists
        ]
        if dtypes[0].kind not in "iu":
            msg = f"{self.location}: column {genes!r} has {dtypes[0]}, which are not gene numbers"
            raise FormatError(f"{msg}; give another column as `genes=`")
        if n_vars is None:
            n_vars = self._largest() + 1 if ids is None else ids.size
        elif ids is not None and n_vars != ids.size:
            msg = f"`n_vars` must be the number of `gene_ids`, {ids.size}, but got {n_vars}"
            raise ParameterError(f"{self.location}: {msg}; leave it out")
        require_positive("n_vars", n_vars)
        if n_markers is not None and require_integer("n_markers", n_markers) < 0:
            msg = f"`n_markers >= 0` must hold, but got n_markers={n_markers}"
            raise ParameterError(f"{self.location}: {msg}")
        n_stored = n_vars if ids is None else max(_MOST_IDS, int(ids.max()) + 1)
        columns = Columns(
            self.location, self._lists, n_stored, _names(var_names, ids, n_vars), n_markers or 0
        )
        element = self._element(columns, dtypes[1], n_vars)
        element.row_order = self._table.row_order
        if ids is not None:
            other = _LEFT_OUT if n_markers is None else _NOT_THERE
            element.stored_columns = np.full(n_stored, other, np.int32)
            element.stored_columns[ids] = np.arange(ids.size)
        self.elements = {"X": element}

    def __repr__(self) -> str:
        return f"HuggingFaceSource({str(self.location)!r})"

    def _element(self, columns: Columns, dtype: np.dtype[Any], n_vars: int) -> StoredElement:
        order = self._table.row_order
        n_rows = len(self._table()) if order is None else order.size
        paths, stored = self._table.list_columns(self._lists)
        if stored is not None and dtype != np.float16:
            return ArrowLists(columns, *stored.of_files(paths), (n_rows, n_vars))
        reason = (
            "cellfeed does not decode float16"
            if stored
            else "its files do not have the layout of memory"
        )
        return ArrowRows(
            columns, self._table, dtype, (n_rows, n_vars), reason if self._table.paths else None
        )

    def _largest(self) -> int:
        """Return the largest gene number, after reading all of them."""
        import pyarrow.compute as pc  # noqa: PLC0415

        chunks = self._table().column(self._lists[0]).chunks
        found = [pc.max(pc.list_flatten(chunk)).as_py() for chunk in chunks]
        return max((each for each in found if each is not None), default=0)

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return self._table.obs_names()

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        return self._table.read_obs(columns)

    def files(self) -> Sequence[Path]:
        """Return the files of its rows."""
        return self._table.paths


def _distinct(gene_ids: ArrayLike) -> NDArray[np.int64]:
    ids = np.asarray(gene_ids)
    is_list = ids.ndim == 1 and ids.dtype.kind in "iu" and ids.size > 0
    if not is_list or ids.min() < 0 or np.unique(ids).size != ids.size:
        msg = "`gene_ids` must be one-dimensional, distinct integers from 0, at least one"
        raise ParameterError(f"{msg}, but got {str(gene_ids)[:50]}")
    return ids.astype(np.int64)


def _names(
    names: Sequence[str] | None, ids: NDArray[np.int64] | None, n_vars: int
) -> NDArray[np.object_] | None:
    if names is None:
        return None if ids is None else ids.astype(str).astype(object)
    if len(names) != n_vars:
        msg = f"`var_names` must name {n_vars} genes, but got {len(names)} names"
        raise ParameterError(msg)
    return np.array([str(name) for name in names], object)
