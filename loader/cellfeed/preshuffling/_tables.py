"""The obs table of many files, with the same columns and dtypes in every part."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.collection import exact_numbers, join_column
from cellfeed.extending import FormatError, MismatchError
from cellfeed.preshuffling._job import file_labels
from cellfeed.rows import NumericColumn
from cellfeed.sources import Source, expand, merge_consecutive, split_at


class ObsTable:
    """obs of a collection, read by rows, with the provenance of each cell.

    The columns are those of all files, in order of first appearance; if a file lacks a column, its
    cells have missing values. Categories are the union over the files.

    Parameters
    ----------
    sources, paths
        The sources of the collection, and the paths of their files.
    chosen
        Names of the columns; all columns if None.
    n_stored
        Number of the first sources that are parts of a copy, and have the provenance of their
        cells.

    Attributes
    ----------
    columns
        Names of the columns.
    provenance
        Names of the two columns with the file of each cell, and its row in it. They are the last.

    Raises
    ------
    MismatchError
        A column is numeric in one file and text or categorical in another, or a file that is added
        to parts of a copy has a column with a name of the provenance.
    FormatError
        A file is damaged.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        paths: tuple[str, ...],
        chosen: Sequence[str] | None = None,
        n_stored: int = 0,
    ) -> None:
        self._sources, self._n_stored = sources, n_stored
        self._starts = np.cumsum([0, *(each.n_rows for each in sources)])
        there = [tuple(each.obs_names()) for each in sources]
        taken = {name for names in there for name in names}
        self.provenance = (_free("source_file", taken), _free("source_row", taken))
        self._labels = file_labels(paths[n_stored:])
        no_rows = np.empty(0, np.int64)
        if n_stored:
            self.provenance = (there[0][-2], there[0][-1])
            in_store = sources[0].read_obs_rows(self.provenance[:1], no_rows)
            if set(self._labels).intersection(in_store[self.provenance[0]].cat.categories):
                self._labels = paths[n_stored:]
        for k, source in enumerate(sources[n_stored:], n_stored):
            if both := sorted(set(self.provenance).intersection(there[k])):
                msg = f"{source.location}: obs has {', '.join(map(repr, both))}"
                raise MismatchError(
                    f"{msg}, which in the store say where cells are from; rename them"
                )
            there[k] += self.provenance
        every = dict.fromkeys(name for names in there for name in names)
        given = every if chosen is None else chosen
        columns = [*(name for name in given if name not in self.provenance), *self.provenance]
        self._names = [tuple(name for name in names if name in columns) for names in there]
        empty = [self._stored(k, names, no_rows) for k, names in enumerate(self._names)]
        self._dtypes = {}
        for column in columns:
            own = [
                (source.location, table[column])
                for source, table in zip(sources, empty, strict=True)
                if column in table
            ]
            everywhere = len(own) == len(sources)
            self._dtypes[column] = _common_dtype(column, own, everywhere=everywhere)
        self.columns = tuple(columns)
        index_name = empty[0].index.name
        self._index_name = None if index_name in columns else index_name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, and of the index if it has one."""
        own = () if self._index_name is None else (str(self._index_name),)
        return (*self.columns, *own)

    def read(self, rows: NDArray[np.int64], columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table of cells, indexed by their names.

        Parameters
        ----------
        rows
            Ascending rows of the collection, int64, shape (n,).
        columns
            Names of columns; all if None.
        """
        columns = self.columns if columns is None else columns
        pieces = split_at(merge_consecutive(rows), self._starts)
        read = [self._read_source(k, columns, expand(runs)) for k, runs in pieces]
        return pd.DataFrame(
            {name: _joined([table[name] for _, table in read]) for name in columns},
            index=pd.Index(
                np.concatenate([names for names, _ in read]), dtype=object, name=self._index_name
            ),
        )

    def _read_source(
        self, number: int, columns: Sequence[str], rows: NDArray[np.int64]
    ) -> "tuple[Any, dict[str, Any]]":
        """Return the names of cells of a source, and columns."""
        names, location = self._names[number], self._sources[number].location
        table = self._stored(number, [name for name in columns if name in names], rows)
        found = dict[str, Any]()
        for name in columns:
            dtype = self._dtypes[name]
            if name not in names:
                missing = pd.Series([None], dtype=dtype)
                found[name] = missing.repeat(rows.size).reset_index(drop=True)
                continue
            column = table[name].reset_index(drop=True)
            if isinstance(dtype, np.dtype) and dtype.kind in "iuf":
                found[name] = pd.Series(exact_numbers(name, location, column, dtype))
            else:
                found[name] = column.astype(dtype)
        return np.asarray(table.index, dtype=object), found

    def _stored(self, number: int, names: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return columns of a source as they are stored, with the provenance of its cells."""
        source, k = self._sources[number], number - self._n_stored
        own = names if k < 0 else [each for each in names if each not in self.provenance]
        table = source.read_obs_rows(own, rows)
        if len(table) != rows.size:
            msg = f"{source.location}: obs has {len(table)} rows, but {rows.size} expected"
            raise FormatError(f"{msg}; write the file again")
        if k < 0:
            return table
        dtype = pd.CategoricalDtype([self._labels[k]])
        of_file = pd.Categorical.from_codes(np.zeros(rows.size, np.int8), dtype=dtype)
        values: tuple[Any, Any] = (of_file, rows)
        for name, each in zip(self.provenance, values, strict=True):
            if name in names:
                table[name] = each
        return table


def _common_dtype(
    name: str, columns: "Sequence[tuple[Location, pd.Series[Any]]]", *, everywhere: bool
) -> Any:
    """Return a dtype that can hold a column of all files, with missing values if needed."""
    dtypes = [column.dtype for _, column in columns]
    first, joint = dtypes[0], join_column(name, columns)
    same = all(dtype == first for dtype in dtypes)
    if isinstance(joint, NumericColumn):
        if same and (everywhere or pd.api.types.is_extension_array_dtype(first)):
            return first
        # As in a collection: NaN where it is missing, of pandas' nullable numbers too.
        numbers = joint.values  # noqa: PD011 - not pandas'
        return numbers.dtype if everywhere else np.result_type(numbers.dtype, np.float64)
    if all(isinstance(dtype, pd.CategoricalDtype) for dtype in dtypes):
        return first if same else pd.CategoricalDtype(pd.Index(joint.categories).infer_objects())
    is_boolean = any(pd.api.types.is_bool_dtype(dtype) for dtype in dtypes)
    if same and everywhere:
        return first
    return pd.BooleanDtype() if is_boolean else pd.StringDtype()


def _joined(parts: "Sequence[pd.Series[Any]]") -> Any:
    return parts[0].array if len(parts) == 1 else pd.concat(parts, ignore_index=True).array


def _free(name: str, taken: Collection[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
