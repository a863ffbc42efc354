"""Sparse and ragged rows, elements by name, and obs columns, in NumPy and SciPy."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ColumnError, ParameterError
from cellfeed._lazy import sp
from cellfeed._runs import expand
from cellfeed.decode import kernels
from cellfeed.decode._placing import RowGroup

Layout = Literal["csr", "dense", "ragged"]

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
        return RowGroup(
            n_rows=len(self.indptr) - 1,
            values=self.data.ctypes.data,
            pointers=self.indptr.ctypes.data,
            pointer_itemsize=self.indptr.itemsize,
        )

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
