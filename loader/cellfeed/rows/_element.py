"""Elements, arrays with a row for each cell of a collection; and cells in NumPy and SciPy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed.decode import ChunkedArray, ChunkReads, Extents, RowRanges
from cellfeed.rows._layout import ByElement, CsrRows, Layout, RowTarget, refuse_element

if TYPE_CHECKING:
    from cellfeed.rows._minibatch import Minibatch

# obs columns of a whole collection: codes with one vocabulary, or numbers.


@dataclass(frozen=True, slots=True, eq=False)
class CategoricalColumn:
    """A column of categories, strings or booleans, as codes.

    Parameters
    ----------
    codes
        The category of each cell as an index into ``categories``, -1 if missing; shape (n_cells,),
        of the smallest signed integer dtype that holds them.
    categories
        The vocabulary, shape (n_categories,): the union over all files, in order of first
        appearance. ``categories[code]`` decodes any code except -1.
    is_nullable
        Whether missing ones are pandas' NA in a file, of which no comparison holds.
    """

    codes: NDArray[np.signedinteger]
    categories: NDArray[Any]
    is_nullable: bool = False

    @property
    def values(self) -> NDArray[np.signedinteger]:
        """The codes, which minibatches contain."""
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
        One number per cell, NaN if missing, shape (n_cells,).
    is_nullable
        Whether missing ones are pandas' NA in a file, of which no comparison holds.
    """

    values: NDArray[Any]
    is_nullable: bool = False


ObsColumn = CategoricalColumn | NumericColumn


# Columns of each source as columns of the collection: which become which, or are left out.


class ColumnMap:
    """What each column of a source is in a collection.

    Parameters
    ----------
    columns
        The column of the collection that each becomes, distinct, -1 where it is left out, -2 where
        no element may be, int32, shape (n_columns of the source,).
    n_columns
        Columns of the collection; those that the source lacks are zero.

    Attributes
    ----------
    is_identity
        Whether columns do not change: they are the first of the collection, in the same order.
    keeps_all
        Whether none is left out.
    covers
        Whether the source lacks none.
    """

    def __init__(self, columns: NDArray[np.int32], n_columns: int) -> None:
        self.columns, self.n_columns = columns, n_columns
        self.is_identity = np.array_equal(columns, np.arange(columns.size))
        self.keeps_all = bool((columns != -1).all())
        self.covers = int(np.count_nonzero(columns >= 0)) == n_columns


def column_maps(maps: Sequence[NDArray[np.integer]], n_columns: int) -> tuple[ColumnMap, ...]:
    """Return the column map of each source; equal ones are one object.

    Parameters
    ----------
    maps
        What each column of each source becomes; see `ColumnMap`.
    n_columns
        Columns of the collection.
    """
    made = dict[bytes, ColumnMap]()
    found = list[ColumnMap]()
    for each in maps:
        columns = np.ascontiguousarray(each, np.int32)
        key = columns.tobytes()
        if key not in made:
            made[key] = ColumnMap(columns, n_columns)
        found.append(made[key])
    return tuple(found)


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
    given = dtype if isinstance(dtype, Mapping) else dict.fromkeys(elements, dtype)
    for name in given:
        if name not in elements:
            there = ", ".join(map(repr, elements))
            msg = f"`dtype` names {name!r}, which is not among the elements read: {there}"
            raise ParameterError(msg)
    dtypes = {name: given.get(name) or each.dtype for name, each in elements.items()}
    for name, each in elements.items():
        if each.dtype.names is not None and dtypes[name] != each.dtype:
            fields = ", ".join(map(repr, each.dtype.names))
            msg = (
                f"`dtype` must leave out {name!r}, whose values have fields ({fields}); give "
                "dtypes of other elements by name, and cast fields in `batch_transform`"
            )
            raise ParameterError(msg)
    return dtypes


# Rows in chunked arrays that cellfeed decodes.


class SparseChunks(ABC):
    """Sparse rows in chunks.

    Attributes
    ----------
    indices, data
        Column indices and values of all elements, one-dimensional.
    n_columns
        Number of columns.
    """

    layout: ClassVar[Layout] = "csr"
    indices: ChunkedArray
    data: ChunkedArray
    n_columns: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the values."""
        return self.data.dtype

    @abstractmethod
    def extents(self, rows: NDArray[np.int64]) -> Extents:
        """Return where rows lie in both arrays.

        Parameters
        ----------
        rows
            Ascending, int64, shape (n,).

        Raises
        ------
        FormatError
            The storage is damaged.
        """

    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of elements in each of these ascending rows, int64, shape (n,)."""
        return self.extents(rows).lengths

    def reads(
        self,
        extents: Extents,
        target: RowTarget,
        column_map: NDArray[np.int32] | None = None,
    ) -> list[ChunkReads]:
        """Return the reads of rows to a target: of column indices, and of values.

        Parameters
        ----------
        extents
            Where the rows lie.
        target
            Destinations of the rows, as a dtype that values can be cast to.
        column_map
            New index of each stored column, none of which is left out; None if they do not change.
        """
        destinations = extents.destinations(target.destinations[0], target.dtypes[0].itemsize)
        indices = self.indices.reads_of_ranges(
            extents.in_indices,
            extents.counts,
            destinations,
            target.dtypes[0],
            index_limit=self.n_columns,
            column_map=column_map,
        )
        if extents.within is not None:
            crossings = [indices.crossings, destinations[extents.within > 0]]
            indices = replace(indices, crossings=np.concatenate(crossings))
        data = self.data.reads_of_ranges(
            extents.firsts,
            extents.counts,
            extents.destinations(target.destinations[-1], target.dtype.itemsize),
            target.dtype,
        )
        return [indices, replace(data, are_whole=data.are_whole and extents.rows is None)]


@dataclass(frozen=True, eq=False)
class CsrChunks(SparseChunks):
    """Sparse rows in chunks, with row pointers.

    Parameters
    ----------
    indptr
        Row pointers, ascending, int64, shape (n_rows + 1,).
    indices, data, n_columns
        See `SparseChunks`.
    """

    indptr: NDArray[np.int64]
    indices: ChunkedArray
    data: ChunkedArray
    n_columns: int

    def extents(self, rows: NDArray[np.int64]) -> Extents:
        """See `SparseChunks`."""
        starts, lengths = self.ranges(rows)
        return Extents(lengths=lengths, firsts=starts, counts=lengths)

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the starts of rows in the arrays, and the number of elements in each.

        Parameters
        ----------
        rows
            Row numbers, int64, shape (n,).
        """
        starts = self.indptr[rows]
        return starts, self.indptr[rows + 1] - starts


@dataclass(frozen=True, slots=True, eq=False)
class DenseChunks:
    """Dense rows in chunks.

    Parameters
    ----------
    values
        Array of shape (n_rows, n_columns), or the same values in C order in one dimension.
    n_columns
        Number of columns.
    """

    layout: ClassVar[Layout] = "dense"
    values: ChunkedArray
    n_columns: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the values."""
        return self.values.dtype

    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of values in each of these rows, int64, shape (n,)."""
        return np.full(rows.size, self.n_columns, np.int64)

    def reads(
        self,
        rows: NDArray[np.int64],
        destinations: NDArray[np.int64],
        dtype: np.dtype[Any],
        column_map: NDArray[np.int32] | None = None,
    ) -> ChunkReads:
        """Return the reads of ascending rows.

        Parameters
        ----------
        rows, destinations
            The rows, and the destination of each, int64, shape (n,).
        dtype
            Dtype at the destinations, which values can be cast to.
        column_map
            New index of each stored column, -1 to leave it out; None if they do not change.
        """
        values = self.values
        if len(values.shape) > 1:
            return values.reads_of_rows(rows, destinations, dtype, column_map=column_map)
        ranges = rows * self.n_columns, self.lengths_of(rows)
        return values.reads_of_ranges(*ranges, destinations, dtype, column_map=column_map)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedChunks:
    """Ragged rows, concatenated in a chunked array.

    Parameters
    ----------
    indptr
        Start of each row, and end of the last; ascending, int64, shape (n_rows + 1,).
    values
        Values of all rows, one-dimensional.
    """

    layout: ClassVar[Layout] = "ragged"
    indptr: NDArray[np.int64]
    values: ChunkedArray

    @property
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the values."""
        return self.values.dtype

    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of values in each of these rows, int64, shape (n,)."""
        return self.indptr[rows + 1] - self.indptr[rows]

    def reads(
        self, rows: NDArray[np.int64], destinations: NDArray[np.int64], dtype: np.dtype[Any]
    ) -> ChunkReads:
        """Return the reads of ascending rows; see `DenseChunks`."""
        lengths = self.lengths_of(rows)
        return self.values.reads_of_ranges(self.indptr[rows], lengths, destinations, dtype)


Chunks = SparseChunks | DenseChunks | RaggedChunks | RowRanges
"""Rows that cellfeed decodes."""


# Cells of a collection in NumPy and SciPy.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cells(ByElement):
    """Cells of a collection in NumPy and SciPy, as ``fetch_transform`` gets and may return them.

    ``cells[indices]`` selects cells from all parts, with their controls and neighbours;
    ``cells["layers/counts"]`` is an element.

    Parameters
    ----------
    elements
        SciPy CSR arrays or NumPy arrays by name, such as ``"X"``, in the order of the collection.
        Each has shape (n_cells, n_columns), or more dimensions if it is stored with more. The first
        is ``cells.X``.
    obs
        One array for each obs column of the collection, shape (n_cells,): codes (-1 where
        missing) of a categorical column, numbers of a numeric one.
    rows
        Row of each cell in the collection, int64, shape (n_cells,).
    obs_names
        Name of each cell in its source, str, shape (n_cells,); None unless the collection was
        opened with ``obs_names=True``.
    controls
        The controls of a minibatch's cells, the same number for each cell, in their order; None
        unless the strategy is `MatchedControls`.
    neighbors
        Their neighbours, in the same way; None unless the strategy is
        `cellfeed.spatial.WithNeighbors`.
    """

    elements: Mapping[str, Any]
    obs: Mapping[str, NDArray[Any]]
    rows: NDArray[np.int64]
    obs_names: NDArray[Any] | None = None
    controls: Cells | None = None
    neighbors: Cells | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, which: str) -> Any: ...

    @overload
    def __getitem__(self, which: NDArray[np.intp]) -> Cells: ...

    def __getitem__(self, which: str | NDArray[np.intp]) -> Any:
        if isinstance(which, str | int):
            return self.elements[which] if which in self else refuse_element(which, self.keys())
        elements = {name: each[which] for name, each in self.elements.items()}
        obs = {name: values[which] for name, values in self.obs.items()}
        names = None if self.obs_names is None else self.obs_names[which]
        companions = dict[str, Cells]()
        for name, each in self.companions.items():  # as many of each cell
            by_cell = np.arange(len(each)).reshape(len(self), len(each) // max(1, len(self)))
            companions[name] = each[by_cell[which].ravel()]
        return Cells(elements, obs, self.rows[which], names, **companions)

    def to_scipy(self) -> Cells:
        """Return the same cells with elements as SciPy or NumPy arrays."""
        elements = {
            name: each.to_scipy() if isinstance(each, CsrRows) else each
            for name, each in self.elements.items()
        }
        companions = {name: each.to_scipy() for name, each in self.companions.items()}
        return Cells(elements, self.obs, self.rows, self.obs_names, **companions)

    def to_torch(self, *, dense: bool = False) -> Minibatch:
        """Return the same cells as tensors, which share memory with the arrays where possible.

        Parameters
        ----------
        dense
            Whether to make sparse elements dense.

        Raises
        ------
        ParameterError
            An element has the dtype longdouble, which torch lacks.
        ColumnError
            An obs column has numbers above the largest int64.
        ImportError
            torch is not installed.
        """
        from cellfeed.rows._minibatch import minibatch_of  # noqa: PLC0415 - it imports torch

        return minibatch_of(self, dense=dense)
