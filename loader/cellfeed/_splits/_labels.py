"""Labels for splits: obs columns by name, or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._collection import Collection
from cellfeed._errors import ColumnError, ParameterError
from cellfeed._lazy import pd
from cellfeed.sampling._labels import factorized

__all__ = ["Labels", "LabelsLike", "labels_of"]

LabelsLike = str | Sequence[str] | ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """Labels of rows.

    Parameters
    ----------
    name
        Name of the labels in messages.
    codes
        Code of each row's label in [0, n), shape (n_rows,).
    labels
        The labels by code, each of which occurs, shape (n,); None for missing labels, and tuples
        for several columns.
    counts
        Number of rows with each label, shape (n,).
    """

    name: str
    codes: NDArray[np.integer]
    labels: tuple[Any, ...]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def labels_of(
    collection: Any, given: LabelsLike, parameter: str, rows: slice | NDArray[np.int64], n_rows: int
) -> Labels:
    """Return the labels of the given rows; missing labels count as one more label.

    Parameters
    ----------
    collection
        The collection with the columns.
    given
        The name of an obs column, several names (whose combinations are the labels), or an array
        with a label for each row of the collection.
    parameter
        Name of the parameter, for messages.
    rows
        The rows.
    n_rows
        Number of rows of the collection.

    Raises
    ------
    ColumnError
        obs has no such column.
    ParameterError
        The number of labels is not the number of rows, or the collection has no obs.
    """
    if isinstance(given, str):
        names = [given]
    elif isinstance(given, list | tuple) and all(isinstance(each, str) for each in given):
        names = list(given)
        if not names:
            raise ParameterError(f"`{parameter}` is empty; name an obs column, or leave it out")
    else:
        return _compact(f"the labels of `{parameter}`", *_of_array(given, parameter, n_rows), rows)
    columns = _columns(collection, names, parameter, n_rows)
    found = _compact(names[0], *columns[0], rows)
    for name, column in zip(names[1:], columns[1:], strict=True):
        found = _combined(found, _compact(name, *column, rows))
    return found


def _columns(
    collection: Any, names: Sequence[str], parameter: str, n_rows: int
) -> list[tuple[NDArray[np.integer], Sequence[Any]]]:
    if isinstance(collection, Collection):
        read = collection.read_obs(names)
        return [factorized(read[name]) for name in names]
    obs = getattr(collection, "obs", None)
    if obs is None:
        msg = (
            f"`{parameter}` names the obs column {names[0]!r}, but a "
            f"{type(collection).__name__} has no obs; give an array with a label for each row"
        )
        raise ParameterError(msg)
    for name in names:
        if name not in obs:
            there = ", ".join(map(str, obs)) or "none"
            msg = f"`{parameter}`: obs has no column {name!r}; its columns are: {there}"
            raise ColumnError(msg)
    return [_of_array(obs[name], parameter, n_rows) for name in names]


def _of_array(
    given: ArrayLike, parameter: str, n_rows: int
) -> tuple[NDArray[np.integer], Sequence[Any]]:
    values: Any = given
    if not isinstance(given, pd.Series | pd.Index | pd.api.extensions.ExtensionArray):
        values = np.asarray(given)
    if values.shape != (n_rows,):
        msg = (
            f"`{parameter}` must have a label for each of {n_rows:,} rows, but has shape "
            f"{values.shape}"
        )
        raise ParameterError(msg)
    return factorized(values)


def _compact(
    name: str,
    codes: NDArray[np.integer],
    values: Sequence[Any],
    rows: slice | NDArray[np.int64],
) -> Labels:
    """Keep only labels that occur in the given rows, with missing labels last."""
    codes = codes[rows]
    known = codes[codes >= 0] if codes.size and codes.min() < 0 else codes
    counts = np.bincount(known, minlength=len(values))
    occur = np.flatnonzero(counts)
    numbers = np.full(len(values) + 1, len(occur), np.min_scalar_type(-max(1, len(occur))))
    numbers[occur] = np.arange(len(occur))
    n_missing = codes.size - known.size
    return Labels(
        name=name,
        codes=numbers[codes],  # -1 takes the last
        labels=(*(values[place] for place in occur.tolist()), *([None] if n_missing else [])),
        counts=np.append(counts[occur], [n_missing] if n_missing else []).astype(np.int64),
    )


def _combined(first: Labels, second: Labels) -> Labels:
    codes, found = factorized(first.codes.astype(np.int64) * len(second) + second.codes)
    ahead = first.labels if isinstance(first, _Combined) else [(each,) for each in first.labels]
    labels = tuple(
        (*ahead[i], second.labels[j]) for i, j in (divmod(each, len(second)) for each in found)
    )
    return _Combined(
        name=f"{first.name}, {second.name}",
        codes=codes,
        labels=labels,
        counts=np.bincount(codes, minlength=len(labels)).astype(np.int64),
    )


class _Combined(Labels):
    """Labels that are tuples, one value for each of several columns."""

    __slots__ = ()
