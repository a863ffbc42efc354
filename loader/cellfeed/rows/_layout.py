"""Rows and elements in memory, groups of rows, and the destination of each row.

A group is the memory of rows that are delivered together, such as a minibatch. Destinations depend
only on the lengths of rows and the order of delivery, so they are computed without allocating
memory or reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ColumnError, ParameterError
from cellfeed._lazy import sp
from cellfeed._runs import expand
from cellfeed.bytes._buffers import Buffer, bind, destination
from cellfeed.decode import kernels
from cellfeed.decode._placing import RowGroup, place_elements

Layout = Literal["csr", "dense", "ragged"]

# Sparse rows in memory.

_WORDS = (1, 2, 4, 8)  # bytes of values that compiled code moves


def summable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of sparse values in SciPy, which does not support float16."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


@dataclass(frozen=True, slots=True, eq=False)
class CsrRows:
    """Sparse rows in CSR form, from which SciPy arrays or torch tensors are made.

    Parameters
    ----------
    indptr, indices
        Row pointers, shape (n_rows + 1,), and column indices, shape (n_elements,), ascending in
        each row; int32 or int64.
    data
        Values, shape (n_elements,).
    n_vars
        Number of columns.
    """

    indptr: NDArray[Any]
    indices: NDArray[Any]
    data: NDArray[Any]
    n_vars: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self.indptr) - 1, self.n_vars

    def to_scipy(self) -> sp.csr_array:
        """Return the rows as a SciPy array over the same memory; float16 becomes float32."""
        data = self.data.astype(summable(self.data.dtype), copy=False)
        return sp.csr_array((data, self.indices, self.indptr), shape=self.shape)

    def located(self) -> RowGroup:
        """Return the addresses of the rows in memory."""
        pointers = self.indptr.ctypes.data
        return RowGroup(len(self.indptr) - 1, self.data.ctypes.data, 0, pointers, self)

    def with_columns(self, columns: NDArray[np.int32], n_vars: int) -> CsrRows:
        """Return the rows with the columns of a collection.

        Parameters
        ----------
        columns
            What each column becomes; see `ColumnMap`.
        n_vars
            Number of columns of the collection.

        Raises
        ------
        ValueError
            An element is in a column that does not exist, or that must have none.
        """
        indices = self.indices
        if indices.size and not 0 <= indices.min() <= indices.max() < columns.size:
            raise ValueError(f"a column index is outside [0, {columns.size})")
        found = columns[indices]
        if found.min(initial=0) < -1:
            raise ValueError("an element is in a column that must have none")
        is_kept = found >= 0
        ends = np.concatenate([[0], np.cumsum(is_kept)])
        return CsrRows(ends[self.indptr], found[is_kept], self.data[is_kept], n_vars)

    def densify_into(self, dense: NDArray[Any]) -> None:
        """Fill ``dense``, of this shape and dtype."""
        if self.data.itemsize not in _WORDS:  # longdouble
            dense[:] = self.to_scipy().toarray()
            return
        bits = np.dtype(f"u{self.data.itemsize}")
        kernels.densify(self.indptr, self.indices, self.data.view(bits), dense.view(bits))


# Rows of different lengths in memory.


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """Rows of different lengths: their concatenated values, and the offset of each row.

    ``rows[indices]`` selects rows, in the given order, and ``rows.row(k)`` is a single row.

    Parameters
    ----------
    offsets
        Start of each row in ``values``, and the end of the last; ascending from 0, int64, shape
        (n_rows + 1,).
    values
        Values of all rows, shape (n_values,); the dtype may be structured.

    Examples
    --------
    >>> rows = RaggedRows(np.array([0, 2, 2, 5]), np.arange(5))
    >>> rows.lengths
    array([2, 0, 3])
    >>> rows[np.array([2, 0])].row(0)
    array([2, 3, 4])
    >>> rows.padded(-1)
    array([[ 0,  1, -1],
           [-1, -1, -1],
           [ 2,  3,  4]])
    """

    offsets: NDArray[np.int64]
    values: NDArray[Any]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: NDArray[np.integer]) -> RaggedRows:
        numbers = np.arange(len(self))[rows]
        runs = np.stack([self.offsets[numbers], self.offsets[numbers + 1]], axis=1)
        offsets = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
        return RaggedRows(offsets, self.values[expand(runs)])

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows."""
        return (len(self),)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of values of each row, int64, shape (n_rows,)."""
        return np.diff(self.offsets)

    def row(self, k: int) -> NDArray[Any]:
        """Return the values of one row."""
        return self.values[self.offsets[k] : self.offsets[k + 1]]

    def padded(self, fill: Any = 0) -> NDArray[Any]:
        """Return the rows as an array as wide as the longest, shape (n_rows, longest).

        Parameters
        ----------
        fill
            Value of the padding after the end of a row.
        """
        lengths = self.lengths
        width = int(lengths.max(initial=0))
        out = np.full((len(self), width), fill, self.dtype)
        out[np.arange(width) < lengths[:, None]] = self.values
        return out


# Access to elements by name, shared by cells and minibatches.


class ObsValues(dict[str, Any]):
    """Values of obs columns by name, which says how a column is opened."""

    def __missing__(self, name: object) -> NoReturn:
        msg = (
            f"minibatches have no obs column {name!r}, only {list(self)}; open it with "
            f"`open_collection(..., obs=[{name!r}])`"
        )
        raise ColumnError(msg)


class _ElementError(ParameterError, KeyError):
    """A mapping has no such element."""

    __str__ = Exception.__str__  # that of `KeyError` puts quotation marks around a message


def refuse_element(name: object, names: KeysView[str]) -> NoReturn:
    """Raise an error for an element that is not there, or for a minibatch that is unpacked."""
    if isinstance(name, str):
        msg = (
            f"minibatches have no element {name!r}, only {list(names)}; open it with "
            f"`open_collection(..., elements=[..., {name!r}])`, or take `minibatch.obs[{name!r}]` "
            "if it is an obs column"
        )
    else:
        msg = (
            f"a minibatch is no sequence, so it has no {name!r} and cannot be unpacked; take "
            "`minibatch.X` and `minibatch.obs[...]`, or `minibatch.items()` for all elements"
        )
    raise _ElementError(msg)


class ByElement:
    """Elements by name, as in a mapping, except that ``len()`` is the number of cells.

    This is not a `collections.abc.Mapping`, since torch's DataLoader pins and collates mappings
    entry by entry, as dictionaries; nor is it iterable, since ``X, y = minibatch`` would take
    names, and Lightning looks for the batch size in whatever is iterated over.
    """

    __slots__ = ()
    elements: Mapping[str, Any]
    obs: Mapping[str, Any]
    rows: Any
    obs_names: Any
    controls: Any
    neighbors: Any

    def __post_init__(self) -> None:
        """Let obs say which column is missing."""
        object.__setattr__(self, "obs", ObsValues(self.obs))

    @property
    def X(self) -> Any:  # noqa: N802 - as AnnData has it
        """The first element, shape (n_cells, n_columns)."""
        return next(iter(self.elements.values()))

    @property
    def companions(self) -> Mapping[str, Any]:
        """The cells that come with these, ``controls`` or ``neighbors``, by name, if any."""
        both = {"controls": self.controls, "neighbors": self.neighbors}
        return {name: each for name, each in both.items() if each is not None}

    def __repr__(self) -> str:
        parts = [
            f"{len(self.rows):,} cells",
            *(f"{name} ({_shown(each)})" for name, each in self.items()),
        ]
        parts += [
            f"obs={list(self.obs)}",
            *(f"{name}={each}" for name, each in self.companions.items()),
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __contains__(self, name: object) -> bool:
        return name in self.elements

    def keys(self) -> KeysView[str]:
        """Return the names of the elements, in order."""
        return self.elements.keys()

    def values(self) -> ValuesView[Any]:
        """Return the elements, in order."""
        return self.elements.values()

    def items(self) -> ItemsView[str, Any]:
        """Return pairs of name and element, in order."""
        return self.elements.items()


def _shown(element: Any) -> str:
    """Say what an array or tensor is: its layout, dtype and shape, and on which device."""
    values, layout = element, "dense"
    if hasattr(element, "offsets"):
        values, layout = element.values, "ragged"
    elif hasattr(element, "indptr"):
        values, layout = element.data, "csr"
    elif "csr" in str(getattr(element, "layout", "")):
        layout = "csr"
    dtype, device = str(values.dtype).removeprefix("torch."), str(getattr(values, "device", "cpu"))
    shape = " x ".join(f"{n:,}" for n in element.shape)
    return f"{layout} {dtype}, {shape}" + (f", {device}" if device != "cpu" else "")


# Checks for values that tensors cannot hold.


def require_torch_dtype(dtype: np.dtype[Any]) -> None:
    """Check that torch has a numeric dtype; it has none above 64 bits.

    Raises
    ------
    ParameterError
        torch does not have it.
    """
    if dtype.itemsize > np.dtype(np.float64).itemsize and dtype.kind == "f":
        msg = f"values are stored as {dtype}, which torch does not support; give `dtype='float64'`"
        raise ParameterError(msg)


def require_int64(what: str, values: NDArray[Any]) -> None:
    """Check that integers of obs fit into int64, to which they are converted in torch.

    Raises
    ------
    ColumnError
        One of them is above the largest int64.
    """
    if values.dtype != np.uint64:
        return
    largest = np.iinfo(np.int64).max
    if values.size and values.max() > largest:
        msg = (
            f"{what} has {values.max()}, above {largest}, the largest int64 that tensors can "
            "hold; store it as text or as a category"
        )
        raise ColumnError(msg)


# Groups of rows, and destinations.

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTarget:
    """Destinations of rows.

    ``target[first:stop]`` or ``target[numbers]`` are the destinations of some of the rows.

    Parameters
    ----------
    lengths
        Number of elements in each row, int64, shape (n_rows,).
    destinations
        Start of each row in each array, of int64 arrays of shape (n_rows,): destinations, or
        addresses once the target is bound. Sparse rows have two arrays, of column indices and of
        values; other rows have one, of values.
    dtypes
        Dtype of each array; that of column indices is int32.
    """

    lengths: NDArray[np.int64]
    destinations: Sequence[NDArray[np.int64]]
    dtypes: Sequence[np.dtype[Any]]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.dtypes[-1]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> RowTarget:
        own = [each[rows] for each in self.destinations]
        return replace(self, lengths=self.lengths[rows], destinations=own)

    def bound(self, bases: NDArray[np.int64]) -> RowTarget:
        """Return the same target in memory whose groups begin at ``bases``."""
        return replace(self, destinations=[bind(each, bases) for each in self.destinations])

    def put(self, rows: Any) -> bool:
        """Place all rows; the target must be bound.

        Parameters
        ----------
        rows
            `CsrRows` or `RaggedRows` of the stated lengths, or an array of shape (n_rows,
            n_columns) or with more dimensions; of any numeric dtype, cast as by NumPy. Dense rows
            may be shorter than stated.

        Returns
        -------
        Whether the columns of each row ascend strictly.

        Raises
        ------
        ValueError
            A column index is out of bounds, or the sizes differ from the stated ones.
        """
        ascending, lengths = True, self.lengths
        starts = np.cumsum(lengths) - lengths
        if isinstance(rows, CsrRows):
            values = rows.data
            self._check_lengths(np.diff(rows.indptr))
            ascending = place_elements(
                rows.indices,
                starts,
                lengths,
                self.destinations[0],
                self.dtypes[0],
                index_limit=rows.n_vars,
            )
        elif isinstance(rows, RaggedRows):
            values = rows.values
            self._check_lengths(rows.lengths)
        else:
            n_columns, row_size = int(lengths.max(initial=0)), math.prod(rows.shape[1:])
            if len(rows) != len(self) or (len(self) and row_size > n_columns):
                msg = f"expected rows of shape {(len(self), n_columns)}, but got {rows.shape}"
                raise ValueError(msg)
            lengths = np.full(len(self), row_size, np.int64)
            starts, values = np.cumsum(lengths) - lengths, rows.reshape(-1)
        place_elements(values, starts, lengths, self.destinations[-1], self.dtype)
        return ascending

    def _check_lengths(self, lengths: NDArray[Any]) -> None:
        if not np.array_equal(lengths, self.lengths):
            raise ValueError("the lengths of rows differ from the stated ones")


@dataclass(frozen=True, slots=True, eq=False)
class FoundRows:
    """Sparse rows with known lengths, whose elements are decoded to their destinations.

    Parameters
    ----------
    lengths
        Number of elements of each row, int64, shape (n_rows,).
    put
        Writes all rows to a target, which is bound; returns whether the columns of each row ascend
        strictly. It may be called again.
    """

    lengths: NDArray[np.int64]
    put: Callable[[RowTarget], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How rows that are delivered together lie in memory.

    Sparse rows are column indices, followed by values; dense rows are in C order; ragged rows are
    concatenated.

    Parameters
    ----------
    layout
        Layout of the rows.
    pointers
        Start of each row among the elements, and end of the last, shape (n_rows + 1,); int32 if
        rows are sparse, else int64.
    row_shape
        Shape of a row: the number of columns, or several numbers; ``()`` if rows are ragged.
    dtype
        Dtype of the values.
    data_start
        Start of the values in bytes.
    """

    layout: Layout
    pointers: NDArray[Any]
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    data_start: int = 0

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return int(self.pointers[-1])

    @property
    def n_bytes(self) -> int:
        """Size of the memory in bytes."""
        return self.data_start + self.n_elements * self.dtype.itemsize

    def over(self, buffer: Buffer, *, distinct: bool = True) -> Any:
        """Return the rows in memory: `CsrRows`, `RaggedRows` or an array.

        Parameters
        ----------
        buffer
            Memory of at least `n_bytes`.
        distinct
            Whether the columns of each sparse row, which ascend, are distinct. If not, duplicates
            are summed.
        """
        values = buffer.array(self.dtype, self.n_elements, start=self.data_start)
        if self.layout == "dense":
            return values.reshape(len(self.pointers) - 1, *self.row_shape)
        if self.layout == "ragged":
            return RaggedRows(self.pointers, values)
        indices = buffer.array(self.pointers.dtype, self.n_elements)
        rows = CsrRows(self.pointers, indices, values, self.row_shape[0])
        return rows if distinct else _summed(rows)

    def sort(self, buffer: Buffer) -> bool:
        """Sort the columns of each sparse row, as torch requires.

        Parameters
        ----------
        buffer
            Memory of the rows.

        Returns
        -------
        Whether the columns of each row are distinct; if not, see `over`.
        """
        if self.layout != "csr":
            return True
        rows = self.over(buffer)
        values = buffer.array(np.dtype(np.uint8), rows.data.nbytes, start=self.data_start)
        return bool(kernels.sort_rows(rows.indptr, rows.indices, values, rows.data.itemsize))

    def located(self, buffer: Buffer) -> RowGroup:
        """Return the addresses of sparse or dense rows in memory."""
        n_rows, values = len(self.pointers) - 1, buffer.address + self.data_start
        if self.layout == "dense":
            return RowGroup(n_rows, values, math.prod(self.row_shape), 0, buffer)
        return RowGroup(n_rows, values, 0, self.pointers.ctypes.data, (buffer, self.pointers))


def _summed(rows: CsrRows) -> CsrRows:
    values = rows.data.astype(summable(rows.data.dtype), copy=False)
    matrix = sp.csr_array((values, rows.indices, rows.indptr), shape=rows.shape)
    matrix.sum_duplicates()
    summed = matrix.data.astype(rows.data.dtype, copy=False)
    return CsrRows(matrix.indptr, matrix.indices, summed, rows.n_vars)


# Sources, targets and sizes in bytes of rows that are copied, int64 arrays of one shape.
Copies = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def lay_out(
    layout: Layout,
    lengths: NDArray[np.int64],
    order: NDArray[np.intp],
    bounds: NDArray[np.int64],
    *,
    row_shape: tuple[int, ...],
    dtype: np.dtype[Any],
    first_number: int = 0,
) -> tuple[Sequence[Group], RowTarget, Sequence[Copies]]:
    """Lay out rows in groups.

    Parameters
    ----------
    layout
        Layout of the rows.
    lengths
        Number of elements in each distinct row, int64, shape (n_distinct,).
    order
        The row that is delivered at each position, shape (n_delivered,); each at least once.
    bounds
        Positions where groups begin and end, ascending, shape (n_groups + 1,).
    row_shape, dtype
        Shape of a row, see `Group`, and dtype of the values.
    first_number
        Number of the first group among all groups of the fetch.

    Returns
    -------
    The groups; the destinations of the distinct rows; and the copies to make afterwards, of rows
    that are delivered again, which are read once.

    Raises
    ------
    ParameterError
        The sparse rows of a group have 2^31 elements or more.
    """
    ends = np.concatenate([[0], np.cumsum(lengths[order])])
    sizes = np.diff(ends[bounds])
    numbers = np.repeat(np.arange(sizes.size), np.diff(bounds))
    elements = ends[:-1] - ends[bounds[:-1]][numbers]
    groups_of_rows = numbers + first_number
    dtypes, destinations = [dtype], list[NDArray[np.int64]]()
    data_starts = np.zeros_like(sizes)
    # SciPy and torch want one dtype for row pointers and column indices.
    index_dtype = np.dtype(np.int32 if layout == "csr" else np.int64)
    if layout == "csr":
        most = int(sizes.max(initial=0))
        if most > np.iinfo(np.int32).max:
            msg = f"{most:,} non-zeros are too many for one minibatch, which has fewer than 2^31"
            raise ParameterError(f"{msg}; read fewer rows at once")
        data_starts = -(-sizes * index_dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        dtypes.insert(0, index_dtype)
        destinations.append(destination(groups_of_rows, elements * index_dtype.itemsize))
    destinations.append(
        destination(groups_of_rows, data_starts[numbers] + elements * dtype.itemsize)
    )
    # Row pointers of all groups, concatenated; each group has one extra entry.
    pointers = np.empty(elements.size + sizes.size, index_dtype)
    pointers[np.arange(elements.size) + numbers] = elements
    pointers[bounds[1:] + np.arange(sizes.size)] = sizes
    firsts = (bounds + np.arange(bounds.size)).tolist()
    groups = [
        Group(
            layout=layout,
            pointers=pointers[first:stop],
            row_shape=row_shape,
            dtype=dtype,
            data_start=data_start,
        )
        for (first, stop), data_start in zip(pairwise(firsts), data_starts.tolist(), strict=True)
    ]
    # Where each distinct row is delivered first, and where all others are delivered.
    first = np.empty(lengths.size, np.intp)
    first[order[::-1]] = np.arange(order.size)[::-1]
    is_again = np.ones(order.size, np.bool_)
    is_again[first] = False
    again = np.flatnonzero(is_again)
    target = RowTarget(
        lengths=lengths, destinations=[each[first] for each in destinations], dtypes=dtypes
    )
    copies = [
        (each[first[order[again]]], each[again], lengths[order[again]] * of_array.itemsize)
        for each, of_array in zip(destinations, dtypes, strict=True)
    ]
    return groups, target, copies
