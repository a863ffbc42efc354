"""Elements: arrays with a row for each cell of a collection."""

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
"""One dtype for all elements, or dtypes by name; other elements keep their dtype."""


class ColumnNames:
    """Names of columns, which may be many millions, and are read on demand.

    Parameters
    ----------
    read
        Returns the names, str, shape (n_columns,).
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
    """An array with a row for each cell of a collection, over all its files.

    Parameters
    ----------
    name
        Name such as ``"X"``, ``"layers/counts"``, ``"raw/X"`` or ``"obsm/X_pca"``.
    dtype
        Dtype of the values, which can hold those of every file.
    layout
        Layout for reading: "csr" if any file stores it so, else "dense"; or "ragged".
    row_shape
        Shape of a row: the number of columns, or several numbers for arrays with three or more
        dimensions, such as images; ``()`` for ragged rows, which have no columns.
    names
        Returns `column_names`.
    stored_as
        Its path in each file of the collection.
    column_maps
        Position of each file's columns among these; None if they are the same in all files.
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
        """Number of columns, the values in a dense row."""
        return math.prod(self.row_shape)

    @property
    def column_names(self) -> NDArray[np.object_]:
        """Names of the columns, str: genes, or numbers if the array has no names.

        For an array with three or more dimensions, these are names along the second one.
        """
        return self.names()

    def __repr__(self) -> str:
        columns = " x ".join(f"{n:,}" for n in self.row_shape)
        columns = f"{columns} columns, " if columns else ""
        return f"Element({self.name!r}, {columns}{self.layout} {self.dtype})"


def dtypes_of(elements: Mapping[str, Element], dtype: Dtypes) -> dict[str, np.dtype[Any]]:
    """Return the dtype for reading each element.

    Raises
    ------
    ParameterError
        A dtype is given for a missing element, or for one whose values have fields.
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
