"""Elements: the arrays that are aligned with the cells of a collection."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed._layouts._column_maps import ColumnMap

__all__ = ["ColumnNames", "Dtypes", "Element", "Layout", "dtypes_of"]

Layout = Literal["csr", "dense", "ragged"]

Dtypes = np.dtype[Any] | Mapping[str, np.dtype[Any]] | None
"""One dtype for all elements, or some by name; those that are not named stay as they are."""


class ColumnNames:
    """Names of columns, of which there may be many millions: read when they are asked for.

    Parameters
    ----------
    read
        Returns them, str, shape (n_columns,).
    """

    def __init__(self, read: Callable[[], NDArray[np.object_]]) -> None:
        self._read = read
        self._names: NDArray[np.object_] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_names": None}

    def __call__(self) -> NDArray[np.object_]:
        """Return the names."""
        if self._names is None:
            self._names = self._read()
        return self._names


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Element:
    """One array that has a row for each cell of a collection, over all its files.

    Parameters
    ----------
    name
        Such as ``"X"``, ``"layers/counts"``, ``"raw/X"`` or ``"obsm/X_pca"``.
    dtype
        Dtype of the values: one that holds those of every file.
    layout
        How rows are read: "csr" if any file is stored so, else "dense"; or "ragged".
    row_shape
        Shape of a row: the number of columns, or, of an array of three and more dimensions such as
        images, several numbers; of ragged rows, which have none, ``()``.
    names
        Returns `column_names`.
    stored_as
        Its path in each file of the collection.
    column_maps
        Where the columns of each file are among these; None if they are the same everywhere.
    """

    name: str
    dtype: np.dtype[Any]
    layout: Layout
    row_shape: tuple[int, ...]
    names: ColumnNames
    stored_as: tuple[str, ...]
    column_maps: tuple[ColumnMap, ...] | None = None

    @property
    def n_columns(self) -> int:
        """Number of columns: of values in a dense row."""
        return math.prod(self.row_shape)

    @property
    def column_names(self) -> NDArray[np.object_]:
        """What columns stand for, str: genes, or, of an array that names none, their numbers.

        Of an array of three and more dimensions, what the second of them stands for.
        """
        return self.names()

    def __repr__(self) -> str:
        columns = " x ".join(f"{n:,}" for n in self.row_shape)
        columns = f"{columns} columns, " if columns else ""
        return f"Element({self.name!r}, {columns}{self.layout} {self.dtype})"


def dtypes_of(elements: Mapping[str, Element], dtype: Dtypes) -> dict[str, np.dtype[Any]]:
    """Return the dtype that each element is read as.

    Raises
    ------
    ParameterError
        A dtype is given for an element that is not there, or whose values have fields.
    """
    if isinstance(dtype, Mapping):
        for name in dtype:
            if name not in elements:
                there = ", ".join(map(repr, elements))
                msg = f"`dtype` names {name!r}, which is not among the elements read: {there}"
                raise ParameterError(msg)
        dtypes = {name: dtype.get(name, each.dtype) for name, each in elements.items()}
    else:
        dtypes = {name: each.dtype if dtype is None else dtype for name, each in elements.items()}
    for name, each in elements.items():
        if each.dtype.names is not None and dtypes[name] != each.dtype:
            fields = ", ".join(map(repr, each.dtype.names))
            msg = (
                f"`dtype` must leave out {name!r}, whose values have fields ({fields}); give "
                "dtypes of other elements by name, and cast fields in `batch_transform`"
            )
            raise ParameterError(msg)
    return dtypes
