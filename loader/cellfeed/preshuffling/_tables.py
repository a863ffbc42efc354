"""Tables of the cells of many files, with the same columns and dtypes in every part."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from cellfeed.sources.anndata import AnnDataSource


@dataclass(frozen=True, slots=True, eq=False)
class FileTable:
    """A table of the cells of one file.

    Parameters
    ----------
    location
        The file.
    n_rows
        Number of its cells.
    names
        Names of the columns.
    read
        Returns columns of ascending rows, indexed by the names of the cells.
    """

    location: Location
    n_rows: int
    names: Sequence[str]
    read: Callable[[Sequence[str], NDArray[np.int64]], pd.DataFrame]


class CellTable:
    """A table of the cells of a collection, read by rows.

    The columns are those of all files, in order of first appearance; if a file lacks a column, its
    cells have missing values. Categories are the union over the files.

    Parameters
    ----------
    name
        Name of the table, for messages.
    files
        The table of each file.
    chosen
        Names of the columns; all columns if None.

    Attributes
    ----------
    files
        The table of each file.
    starts
        First row of each file in the collection, and the number of rows, int64.

    Raises
    ------
    MismatchError
        A column is numeric in one file and text or categorical in another.
    FormatError
        A file is damaged.
    """

    def __init__(
        self, name: str, files: Sequence[FileTable], chosen: Sequence[str] | None = None
    ) -> None:
        self.starts = np.cumsum([0, *(each.n_rows for each in files)])
        self._name, self.files = name, files
        there = tuple(dict.fromkeys(name for each in files for name in each.names))
        columns = there if chosen is None else tuple(chosen)
        self._names = [tuple(name for name in each.names if name in columns) for each in files]
        no_rows = np.empty(0, np.int64)
        empty = [each.read(names, no_rows) for each, names in zip(files, self._names, strict=True)]
        self._dtypes = {}
        for column in columns:
            own = [
                (each.location, table[column])
                for each, table in zip(files, empty, strict=True)
                if column in table
            ]
            everywhere = len(own) == len(files)
            self._dtypes[column] = _common_dtype(column, own, everywhere=everywhere)
        index_name = empty[0].index.name
        self._index_name = None if index_name in columns else index_name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, and of the index if it has one."""
        own = () if self._index_name is None else (str(self._index_name),)
        return (*self._dtypes, *own)

    def read(self, rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return the table of cells.

        Parameters
        ----------
        rows
            Ascending rows of the collection, int64, shape (n,).
        """
        pieces = split_at(merge_consecutive(rows), self.starts)
        read = [self._read_file(k, expand(runs)) for k, runs in pieces]
        return pd.DataFrame(
            {name: _joined([columns[name] for _, columns in read]) for name in self._dtypes},
            index=pd.Index(
                np.concatenate([names for names, _ in read]), dtype=object, name=self._index_name
            ),
        )

    def _read_file(self, number: int, rows: NDArray[np.int64]) -> "tuple[Any, dict[str, Any]]":
        """Return the names of cells of a file, and all columns."""
        source, names = self.files[number], self._names[number]
        table = source.read(names, rows)
        if len(table) != rows.size:
            msg = (
                f"{source.location}: {self._name} has {len(table)} rows, but {rows.size} "
                "expected; write the file again"
            )
            raise FormatError(msg)
        columns = dict[str, Any]()
        for name, dtype in self._dtypes.items():
            if name not in names:
                missing = pd.Series([None], dtype=dtype)
                columns[name] = missing.repeat(rows.size).reset_index(drop=True)
                continue
            column = table[name].reset_index(drop=True)
            if isinstance(dtype, np.dtype) and dtype.kind in "iuf":
                columns[name] = pd.Series(exact_numbers(name, source.location, column, dtype))
            else:
                columns[name] = column.astype(dtype)
        return np.asarray(table.index, dtype=object), columns


class ObsTable(CellTable):
    """obs of a collection, with the provenance of each cell.

    Parameters
    ----------
    sources, names
        The sources of the collection, and their names.
    chosen
        Names of the columns; all columns if None.
    n_stored
        Number of the first sources that are parts of a copy, and have the provenance of their
        cells.

    Attributes
    ----------
    provenance
        Names of the two columns with the file of each cell, and its row in it. They are the last.

    Raises
    ------
    MismatchError
        A file that is added to parts of a copy has a column with one of these names; otherwise see
        `CellTable`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        names: tuple[str, ...],
        chosen: Sequence[str] | None = None,
        n_stored: int = 0,
    ) -> None:
        files = [
            FileTable(each.location, each.n_rows, tuple(each.obs_names()), each.read_obs_rows)
            for each in sources
        ]
        taken = {name for each in files for name in each.names}
        self.provenance = (_free("source_file", taken), _free("source_row", taken))
        labels = file_labels(names[n_stored:])
        if n_stored:
            self.provenance = provenance_of(sources[0])
            in_store = files[0].read(self.provenance[:1], np.empty(0, np.int64))
            if set(labels).intersection(in_store[self.provenance[0]].cat.categories):
                labels = names[n_stored:]
        own = [
            _with_provenance(each, label, self.provenance)
            for each, label in zip(files[n_stored:], labels, strict=True)
        ]
        super().__init__(
            "obs",
            [*files[:n_stored], *own],
            None if chosen is None else [*chosen, *self.provenance],
        )
        for name in self.provenance:
            self._dtypes[name] = self._dtypes.pop(name)


def provenance_of(part: Source) -> tuple[str, str]:
    """Return the names of the columns of provenance in a part of a copy: the last of its own."""
    modalities = part.modalities() if isinstance(part, AnnDataSource) else ()
    own = [name for name in part.obs_names() if name.partition(":")[0] not in modalities]
    return own[-2], own[-1]


def _with_provenance(file: FileTable, label: str, provenance: tuple[str, str]) -> FileTable:
    """Return the table of a file with two more columns: its label, and the row of each cell."""
    taken = set(provenance).intersection(file.names)
    if taken:
        msg = f"{file.location}: obs has {', '.join(map(repr, sorted(taken)))}"
        raise MismatchError(f"{msg}, which in the store say where cells are from; rename them")

    read = partial(_read_with_provenance, file, label, provenance)
    return replace(file, names=(*file.names, *provenance), read=read)


def _read_with_provenance(
    file: FileTable,
    label: str,
    provenance: tuple[str, str],
    columns: Sequence[str],
    rows: NDArray[np.int64],
) -> pd.DataFrame:
    table = file.read([name for name in columns if name not in provenance], rows)
    of_file = pd.Categorical.from_codes(
        np.zeros(rows.size, np.int8), dtype=pd.CategoricalDtype([label])
    )
    table[provenance[0]], table[provenance[1]] = of_file, rows
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
