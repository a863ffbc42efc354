"""Labels of cells as codes, from an array or from the obs columns of a collection."""

from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import ColumnError, ParameterError
from cellfeed.sampling._base import has_masked

# Integers below are codes as they are; so are those below a few times the number of cells.
_FEW = 1 << 16
_PER_CELL = 4

Codes = NDArray[np.signedinteger[Any]]


def label_codes(labels: Any) -> Codes:
    """Return a code for each cell's label, -1 if missing.

    Parameters
    ----------
    labels
        One label for each cell: numbers, text, categories or anything else that pandas can
        factorize; or a column of a collection. NaN, None, masked values and the number -1 are
        missing labels, whatever the dtype; other negative numbers are labels.

    Raises
    ------
    ParameterError
        They are not one-dimensional, or all of them are missing.
    """
    categorical = _categorical(labels)
    if has_masked(labels):
        codes = _without_minus_one(*factorized(labels))
    elif categorical is None:
        codes = _numbered(_values_of(labels))
    else:
        codes = _without_minus_one(np.asarray(categorical.codes), categorical.categories)
    if codes.size and codes.max() < 0:
        msg = f"`labels` of all {codes.size:,} cells are missing; give some labels"
        raise ParameterError(msg)
    return codes


def _without_minus_one(codes: Codes, labels: Any) -> Codes:
    """Return codes of labels, with -1 for the label that is the number -1."""
    is_number = getattr(getattr(labels, "dtype", None), "kind", "O") in "iuf"
    if is_number:
        (found,) = np.nonzero(np.asarray(labels) == -1)
    else:
        found = np.array([k for k, each in enumerate(labels) if _is_minus_one(each)], np.intp)
    return np.where(np.isin(codes, found), -1, codes) if found.size else codes


def _is_minus_one(label: Any) -> bool:
    return isinstance(label, Number) and bool(label == -1)  # type: ignore[comparison-overlap]


def factorized(labels: Any) -> tuple[Codes, list[Any]]:
    """Return a code for each cell's label, -1 if missing, and the labels by code.

    Parameters
    ----------
    labels
        See `label_codes`, except that -1 is a label like any other.
    """
    categorical = _categorical(labels)
    if categorical is not None:
        return np.asarray(categorical.codes), categorical.categories.tolist()
    import pandas as pd  # noqa: PLC0415 - it takes long, and few need it

    if has_masked(labels):
        codes = np.full(labels.shape, -1)
        codes[~labels.mask], found = factorized(labels.compressed())
        return codes, found
    is_pandas = isinstance(labels, pd.Series | pd.Index | pd.api.extensions.ExtensionArray)
    given = labels if is_pandas else np.asarray(_values_of(labels))
    if not is_pandas and not given.dtype.isnative:
        given = given.astype(given.dtype.newbyteorder("="))
    codes, values = pd.factorize(given)
    return codes, values.tolist()


def _values_of(labels: Any) -> Any:
    """Return the values of a column, or labels that are values: those of a tensor are a method."""
    values = getattr(labels, "values", labels)
    return labels if callable(values) else values


def _categorical(labels: Any) -> Any:
    """Return an object with codes and categories; None if labels are not categorical."""
    given = labels.cat if hasattr(labels, "cat") else labels
    return given if hasattr(given, "codes") else None


def _numbered(labels: ArrayLike) -> Codes:
    values = np.asarray(labels)
    if values.dtype.kind == "U" and not hasattr(labels, "dtype"):
        values = np.asarray(labels, dtype=object)  # else NaN beside text is text
    if values.ndim != 1 or not values.size:
        msg = (
            "`labels` must be one-dimensional, one for each cell, but got "
            f"shape {values.shape} and dtype {values.dtype}"
        )
        raise ParameterError(msg)
    if values.dtype.kind == "b":
        return values.astype(np.int8)
    is_integer = values.dtype.kind in "iu"
    if is_integer and values.min() >= -1 and values.max() < max(_FEW, _PER_CELL * values.size):
        return values.astype(np.int64) if values.dtype.kind == "u" else np.array(values)
    return _without_minus_one(*factorized(values))


def combined_codes(columns: list[Codes]) -> Codes:
    """Return a code for each combination of codes, -1 if one is missing.

    Raises
    ------
    ParameterError
        Their lengths differ.
    """
    if len({each.size for each in columns}) > 1:
        msg = (
            f"`labels` must have the same length, but got lengths {[each.size for each in columns]}"
        )
        raise ParameterError(msg)
    joint, *others = columns
    is_missing = joint < 0
    for codes in others:
        is_missing |= codes < 0
        joint = _numbered(joint.astype(np.int64) * (int(codes.max()) + 1) + codes)
    return np.where(is_missing, -1, joint)


def column_of(collection: Any, name: str, parameter: str = "labels") -> Any:
    """Return an obs column of a collection, or of another object with ``obs``.

    Parameters
    ----------
    collection, name
        The object, and the name of the column.
    parameter
        Name of the parameter that names it, for messages.

    Raises
    ------
    ColumnError
        There is no such column.
    """
    columns = getattr(collection, "obs", None)
    if columns is None:
        msg = (
            f"`{parameter}` names the obs column {name!r}, but a {type(collection).__name__} has "
            "no obs; give an array with a label for each row"
        )
        raise ColumnError(msg)
    if name not in columns:
        there = ", ".join(map(str, columns)) or "none"
        msg = f"`{parameter}`: obs has no column {name!r}; its columns are: {there}"
        if not hasattr(columns, "iloc"):  # of a collection, they are those that it was opened with
            msg += f"; open it with obs=[{name!r}]"
        raise ColumnError(msg)
    return columns[name]
