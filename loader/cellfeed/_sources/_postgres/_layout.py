"""The layout of a collection in a database: tables, columns, and the metadata that names them.

A collection is a schema of the database, with the collection's name and three tables:

- ``cellfeed (key text PRIMARY KEY, value jsonb)``: the metadata;
- ``cells (id bigint PRIMARY KEY, name text, ...)``: a row for each cell, numbered from 0, and a
  column for each obs column;
- ``packed (id bigint PRIMARY KEY, ...)``: a row for each cell, and a column of type bytea for each
  element; `cellfeed._chunks._packed` describes its contents.

docs/how-to/postgres.md documents the layout.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from cellfeed._layouts import Layout

__all__ = ["VERSION", "ElementColumn", "Metadata", "ObsColumn", "column_names", "escaped", "quoted"]

VERSION = 1
_LONGEST = 63  # maximum length of a name in PostgreSQL
_RESERVED = (
    "id", "name", "tableoid", "xmin", "cmin", "xmax", "cmax", "ctid",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ObsColumn:
    """An obs column, and its column in the table of cells.

    Parameters
    ----------
    name, column
        Names in obs, and in the table.
    dtype
        Pandas' name of the dtype; "text", or "category".
    categories
        Categories of "category", text or numbers; None for other dtypes.
    is_ordered
        Whether categories have an order.
    """

    name: str
    column: str
    dtype: str
    categories: Sequence[Any] | None = None
    is_ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementColumn:
    """An element, and its column in the table of packed rows.

    Parameters
    ----------
    name, column
        Name of the element, and of its column in the table.
    layout, dtype
        Layout and dtype of the element; the dtype by its NumPy name.
    row_shape
        Shape of a row.
    genes
        Key of the metadata with the names of its columns; None if they have none.
    n_bytes
        Size of all packed rows; 0 while they are being written.
    """

    name: str
    column: str
    layout: Layout
    dtype: str
    row_shape: Sequence[int]
    genes: str | None
    n_bytes: int = 0

    @property
    def n_columns(self) -> int:
        """Number of values of a dense row."""
        return math.prod(self.row_shape)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return np.dtype(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The metadata of a collection, except for the names of genes.

    Parameters
    ----------
    n_cells
        Number of cells.
    token
        Distinguishes this load from others.
    is_complete
        Whether all cells have been written.
    obs, elements
        Descriptions of obs columns and elements.
    """

    n_cells: int
    token: str
    is_complete: bool
    obs: tuple[ObsColumn, ...]
    elements: tuple[ElementColumn, ...]

    @classmethod
    def from_rows(cls, rows: Mapping[str, Any]) -> Self:
        """Return the metadata in the rows of the table.

        Raises
        ------
        KeyError, TypeError
            They describe no collection.
        """
        return cls(
            n_cells=int(rows["n_cells"]),
            token=str(rows["token"]),
            is_complete=bool(rows["is_complete"]),
            obs=tuple(ObsColumn(**each) for each in rows["obs"]),
            elements=tuple(ElementColumn(**each) for each in rows["elements"]),
        )


def column_names(names: Iterable[str], otherwise: str) -> list[str]:
    """Return a column name for each name: the name itself if PostgreSQL accepts it.

    Examples
    --------
    >>> column_names(["plate", "id", "x" * 70], "obs")
    ['plate', 'obs_1', 'obs_2']
    """
    taken = list[str]()
    for number, name in enumerate(names):
        own = name
        if not name or len(name.encode()) > _LONGEST or name in _RESERVED or name in taken:
            own = f"{otherwise}_{number}"
        while own in taken:
            own += "_"
        taken.append(own)
    return taken


def escaped(sql: str) -> str:
    """Return SQL without placeholders, escaped for use with parameters of psycopg.

    Examples
    --------
    >>> escaped(quoted("% mito"))
    '"%% mito"'
    """
    return sql.replace("%", "%%")


def quoted(*names: str) -> str:
    """Return names quoted for SQL, joined by dots.

    Examples
    --------
    >>> quoted("plates", "packed")
    '"plates"."packed"'
    """
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)
