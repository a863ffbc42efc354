"""obs columns of many files as one table: the same columns and dtypes in every part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import NumericColumn
from cellfeed._collection import exact_numbers, join_column
from cellfeed._preshuffle._inputs import file_labels
from cellfeed._preshuffle._obs_file import INDEX, ObsFile
from cellfeed._runs import expand, merge_consecutive, split_at

__all__ = ["ObsTable"]

_NO_ROWS = np.empty(0, dtype=np.int64)


class ObsTable:
    """obs of a collection with the provenance of each cell, read by rows.

    Columns are those of all files, in order of first appearance; where a file lacks one, its
    cells have it missing. Categories are the union over the files.

    Parameters
    ----------
    paths
        The files.
    starts
        First row of each file in the collection, and the number of rows, shape (n_files + 1,).

    Raises
    ------
    MismatchError
        A column is numeric in one file and text or categorical in another.
    FormatError
        A file is damaged.
    """

    def __init__(self, paths: tuple[str, ...], starts: NDArray[np.int64]) -> None:
        self.starts = starts
        sizes = np.diff(starts).tolist()
        self._files = [ObsFile(path, n) for path, n in zip(paths, sizes, strict=True)]
        names = tuple(dict.fromkeys(name for file in self._files for name in file.columns))
        self._dtypes = {name: self._dtype(name) for name in names}
        index_name = self._files[0].index_name
        self._index_name = None if index_name in names else index_name
        self._source = pd.CategoricalDtype(list(file_labels(paths)))
        self.provenance = (_free("source_file", names), _free("source_row", names))

    def read(self, rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return the obs of some cells, with their provenance.

        Parameters
        ----------
        rows
            Ascending rows of the collection.
        """
        pieces = [(k, expand(runs)) for k, runs in split_at(merge_consecutive(rows), self.starts)]
        read = [self._read_file(self._files[k], local) for k, local in pieces]
        table = pd.DataFrame(
            {name: _joined([part[name] for part in read]) for name in self._dtypes},
            index=pd.Index(
                np.concatenate([part[INDEX] for part in read]), dtype=object, name=self._index_name
            ),
        )
        source_file, source_row = self.provenance
        codes = np.repeat([k for k, _ in pieces], [local.size for _, local in pieces])
        table[source_file] = pd.Categorical.from_codes(codes, dtype=self._source)
        table[source_row] = np.concatenate([local for _, local in pieces])
        return table

    def _read_file(self, file: ObsFile, rows: NDArray[np.int64]) -> "dict[str | None, Any]":
        present = tuple(name for name in self._dtypes if name in file.columns)
        values = file.read((INDEX, *present), rows)
        read = dict(zip(present, values[1:], strict=True))
        table: dict[str | None, Any] = {INDEX: np.asarray(values[0], dtype=object)}
        for name, dtype in self._dtypes.items():
            column = read.get(name)
            if column is not None and isinstance(dtype, np.dtype) and dtype.kind in "iuf":
                numbers = exact_numbers(name, Location(file.path), pd.Series(column), dtype)
                table[name] = pd.Series(numbers)
            else:
                table[name] = _cast(column, dtype, rows.size)
        return table

    def _dtype(self, name: str) -> Any:
        columns = [
            _Column(Location(file.path), file.read((name,), _NO_ROWS)[0])
            for file in self._files
            if name in file.columns
        ]
        return _common_dtype(name, columns, everywhere=len(columns) == len(self._files))


@dataclass(frozen=True, slots=True)
class _Column:
    location: Location
    values: Any  # none, but with dtype and categories

    @property
    def dtype(self) -> Any:
        return self.values.dtype


def _common_dtype(name: str, columns: Sequence[_Column], *, everywhere: bool) -> Any:
    """Return a dtype that holds a column of all files, and what is missing in some."""
    first = columns[0].dtype
    same = all(column.dtype == first for column in columns)
    joint = join_column(name, [(column.location, pd.Series(column.values)) for column in columns])
    if isinstance(joint, NumericColumn):
        if same and (everywhere or pd.api.types.is_extension_array_dtype(first)):
            return first
        # As in a collection: NaN where it is missing, of pandas' nullable numbers too.
        numbers = joint.values  # noqa: PD011 - not pandas'
        return numbers.dtype if everywhere else np.result_type(numbers.dtype, np.float64)
    if all(isinstance(column.dtype, pd.CategoricalDtype) for column in columns):
        return first if same else pd.CategoricalDtype(pd.Index(joint.categories).infer_objects())
    is_boolean = any(pd.api.types.is_bool_dtype(column.dtype) for column in columns)
    if same and everywhere:
        return first
    return pd.BooleanDtype() if is_boolean else pd.StringDtype()


def _cast(values: Any, dtype: Any, n_rows: int) -> "pd.Series[Any]":
    if values is None:
        return pd.Series([None], dtype=dtype).repeat(n_rows).reset_index(drop=True)
    return pd.Series(values).astype(dtype)


def _joined(parts: "Sequence[pd.Series[Any]]") -> Any:
    return parts[0].array if len(parts) == 1 else pd.concat(parts, ignore_index=True).array


def _free(name: str, taken: Sequence[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
