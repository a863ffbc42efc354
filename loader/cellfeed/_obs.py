"""obs columns of a whole collection: codes with one vocabulary, or numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._errors import ColumnError, MismatchError

__all__ = ["CategoricalColumn", "NumericColumn", "ObsColumn", "join_column"]


@dataclass(frozen=True, slots=True, eq=False)
class CategoricalColumn:
    """A column of categories, strings or booleans, as codes.

    Parameters
    ----------
    codes
        Number of each cell's category, -1 where it is missing; the smallest signed integer
        dtype that holds them, shape (n_cells,).
    categories
        The vocabulary, shape (n_categories,): the union over all files, in order of first
        appearance. ``categories[code]`` decodes a code that is not -1.
    """

    codes: NDArray[np.signedinteger]
    categories: NDArray[Any]

    @property
    def values(self) -> NDArray[np.signedinteger]:
        """The codes: what a minibatch carries of this column."""
        return self.codes

    def decode(self, codes: NDArray[np.signedinteger]) -> NDArray[np.object_]:
        """Return the categories of ``codes``, with None where a code is -1."""
        with_missing = np.array([*self.categories, None], dtype=object)
        decoded: NDArray[np.object_] = with_missing[codes]
        return decoded


@dataclass(frozen=True, slots=True, eq=False)
class NumericColumn:
    """A column of numbers.

    Parameters
    ----------
    values
        One number per cell, NaN where it is missing, shape (n_cells,).
    """

    values: NDArray[Any]


ObsColumn = CategoricalColumn | NumericColumn


def join_column(name: str, parts: "Sequence[tuple[Path, pd.Series[Any]]]") -> ObsColumn:
    """Join one column over the files of a collection.

    Parameters
    ----------
    name
        The column, for messages.
    parts
        Each file with its column, in the order of the files.

    Raises
    ------
    MismatchError
        The column is numeric in one file and categorical in another, or its categories are
        text in one and numbers in another.
    ColumnError
        The values are neither numbers nor categories, such as dates.
    """
    kinds = [_kind(name, path, series) for path, series in parts]
    # Categories of which there are none, since all are missing, fit any others.
    known = [place for place, (_, series) in enumerate(parts) if not _has_no_categories(series)]
    first = known[0] if known else 0
    for (path, series), kind in zip(parts, kinds, strict=True):
        fits = kinds[first] != "numbers" if _has_no_categories(series) else kind == kinds[first]
        if not fits:
            msg = (
                f"{path}: obs column {name!r} holds {kind}, but {kinds[first]} in "
                f"{parts[first][0]}; make them the same in the files"
            )
            raise MismatchError(msg)
    if kinds[first] == "numbers":
        return NumericColumn(np.concatenate([_numbers(series) for _, series in parts]))
    return _join_categories([series.astype("category") for _, series in parts])


def _kind(name: str, path: Path, series: "pd.Series[Any]") -> str:
    values = series.cat.categories if isinstance(series.dtype, pd.CategoricalDtype) else series
    if pd.api.types.is_bool_dtype(values.dtype):
        return "booleans"
    if pd.api.types.is_numeric_dtype(values.dtype):
        is_category = isinstance(series.dtype, pd.CategoricalDtype)
        return "categories that are numbers" if is_category else "numbers"
    if pd.api.types.is_string_dtype(values.dtype) or values.dtype == object:
        return "text"
    msg = (
        f"{path}: obs column {name!r} has dtype {values.dtype}, which is no number and no category"
    )
    raise ColumnError(msg)


def _has_no_categories(series: "pd.Series[Any]") -> bool:
    return isinstance(series.dtype, pd.CategoricalDtype) and len(series.cat.categories) == 0


def _numbers(series: "pd.Series[Any]") -> NDArray[Any]:
    if pd.api.types.is_extension_array_dtype(series.dtype):  # pandas' nullable numbers
        return series.to_numpy(dtype=np.float64, na_value=np.nan)
    return series.to_numpy()


def _join_categories(parts: "Sequence[pd.Series[Any]]") -> CategoricalColumn:
    own = [part.cat.categories.to_numpy(dtype=object) for part in parts]
    categories = pd.Index(pd.unique(np.concatenate(own)))
    dtype = np.min_scalar_type(-max(1, len(categories)))
    codes = np.empty(sum(map(len, parts)), dtype=dtype)
    filled = 0
    for part in parts:
        # The last entry, which code -1 selects, keeps "missing" missing.
        to_joint = np.append(
            categories.get_indexer(pd.Index(part.cat.categories, dtype=object)), -1
        )
        codes[filled : filled + len(part)] = to_joint[part.cat.codes.to_numpy()]
        filled += len(part)
    return CategoricalColumn(codes, categories.to_numpy())
