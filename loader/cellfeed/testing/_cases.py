"""Matrices for a suite to store, and the expected results, made from a few numbers and a seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellfeed.bytes._buffers import Buffer, BufferPool
from cellfeed.rows import RaggedRows
from cellfeed.sources import Layout

Columns = Literal["ascending", "in any order", "some twice"]
Values = Literal["counts", "any"]

PLATES = ("plate 1", "plate 2", "plate 3")


@dataclass(frozen=True, kw_only=True)
class StoredCase:
    """A matrix with its annotations, to be written to the tested storage.

    Parameters
    ----------
    layout
        Layout of the stored matrix: CSR, dense or ragged.
    n_rows, n_vars
        Number of cells and of genes.
    dtype
        Dtype of the stored values, as NumPy names it, such as ``">f4"``.
    index_dtype, pointer_dtype
        Dtypes of the stored ``indices`` and ``indptr``.
    density
        Share of elements that are stored.
    columns
        Whether the columns of a row ascend, are in any order, or include duplicates.
    values
        Whether values are small counts, or also include extreme and special values of the dtype.
    element
        Name of the element: ``"X"``, ``"layers/counts"`` or ``"raw/X"``.
    further_shape
        Dimensions of a dense array after cells and genes.
    storage
        Options of the storage, as the suite's ``storages`` draws them.
    seed
        Seed of the random content.

    Examples
    --------
    >>> case = StoredCase(n_rows=2, n_vars=3, density=1.0)
    >>> case.indptr
    array([0, 3, 6], dtype=int32)
    >>> case.in_memory().shape
    (2, 3)
    """

    layout: Layout = "csr"
    n_rows: int
    n_vars: int
    dtype: str = "<f4"
    index_dtype: str = "<i4"
    pointer_dtype: str = "<i4"
    density: float = 0.5
    columns: Columns = "ascending"
    values: Values = "counts"
    element: str = "X"
    further_shape: tuple[int, ...] = ()
    storage: Any = None
    seed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix: (n_rows, n_vars), and `further_shape`; (n_rows,) if ragged."""
        if self.layout == "ragged":
            return (self.n_rows,)
        return self.n_rows, self.n_vars, *self.further_shape

    @property
    def indptr(self) -> NDArray[Any]:
        """Row pointers of CSR or ragged rows, as they must be stored, shape (n_rows + 1,)."""
        return np.cumsum([0, *map(len, self._columns)]).astype(self.pointer_dtype)

    @property
    def indices(self) -> NDArray[Any]:
        """Column of each CSR element, as it must be stored, shape (n_elements,)."""
        return np.concatenate([np.empty(0, np.int64), *self._columns]).astype(self.index_dtype)

    @property
    def data(self) -> NDArray[Any]:
        """Values of CSR elements or ragged rows, as they must be stored, shape (n_elements,)."""
        return self._values(sum(map(len, self._columns)))

    @property
    def dense(self) -> NDArray[Any]:
        """The dense matrix, as it must be stored, of `shape`."""
        values = self._values(math.prod(self.shape)).reshape(self.shape)
        is_stored = self._random(1).random(values.shape) < self.density
        return np.where(is_stored, values, np.zeros((), values.dtype)).astype(self.dtype)

    @property
    def matrix(self) -> Any:
        """The matrix as it must be stored: `dense`, or a `scipy.sparse.csr_matrix` of its parts."""
        if self.layout == "dense":
            return self.dense
        parts = (self.data, self.indices, self.indptr.astype(np.int64))
        return sp.csr_matrix(parts, shape=(self.n_rows, self.n_vars))

    @cached_property
    def obs(self) -> pd.DataFrame:
        """The obs table: ``plate``, categorical, and ``number``, both with missing values."""
        random = self._random(2)
        plates = random.integers(-1, len(PLATES), size=self.n_rows)
        numbers = np.where(random.random(self.n_rows) < 0.2, np.nan, np.arange(self.n_rows))  # noqa: PLR2004 - some
        return pd.DataFrame(
            {
                "plate": pd.Categorical.from_codes(plates, categories=pd.Index(PLATES)),
                "number": numbers,
            },
            index=pd.Index([f"cell{k}" for k in range(self.n_rows)], dtype=object),
        )

    @property
    def var(self) -> pd.DataFrame:
        """The table of genes, which has only names; it is empty for ragged rows."""
        n_vars = 0 if self.layout == "ragged" else self.n_vars
        return pd.DataFrame(index=pd.Index([f"gene{k}" for k in range(n_vars)], dtype=object))

    @property
    def dtype_in_memory(self) -> np.dtype[Any]:
        """Expected dtype of the values that are read, unless another is requested."""
        native = np.dtype(self.dtype).newbyteorder("=")
        widened = self.layout == "csr" and native == np.float16  # SciPy has none of these
        return np.dtype(np.float32) if widened else native

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Number of stored elements in each row."""
        if self.layout == "dense":
            return np.full(self.n_rows, math.prod(self.shape[1:]), np.int64)
        return np.array([len(columns) for columns in self._columns], np.int64)

    def in_memory(self, dtype: np.dtype[Any] | None = None) -> Any:
        """Return the oracle: the dense matrix, of `shape`, or `RaggedRows`.

        Values are cast as by `numpy.ndarray.astype`, and duplicates are summed.
        """
        dtype = self.dtype_in_memory if dtype is None else dtype
        with np.errstate(over="ignore"):
            if self.layout == "ragged":
                return RaggedRows(self.indptr.astype(np.int64), self.data.astype(dtype))
            if self.layout == "dense":
                return self.dense.astype(dtype)
            matrix = np.zeros((self.n_rows, self.n_vars), dtype)
            rows = np.repeat(np.arange(self.n_rows), self.row_lengths)
            np.add.at(matrix, (rows, self.indices.astype(np.int64)), self.data.astype(dtype))
            return matrix

    @cached_property
    def _columns(self) -> list[NDArray[np.int64]]:
        random = self._random(3)
        rows = list[NDArray[np.int64]]()
        for _ in range(self.n_rows):
            columns = np.flatnonzero(random.random(self.n_vars) < self.density)
            if random.random() < 0.2:  # noqa: PLR2004 - some cells have nothing
                columns = columns[:0]
            if self.columns == "some twice" and columns.size:
                columns = np.append(columns, random.choice(columns))
            rows.append(columns if self.columns == "ascending" else random.permutation(columns))
        return rows

    def _values(self, n: int) -> NDArray[Any]:
        dtype, random = np.dtype(self.dtype), self._random(4)
        counts = random.integers(0, 8, n)
        if self.values == "counts":
            return counts.astype(dtype)
        odd = _odd_values(dtype.newbyteorder("="))
        is_odd = random.random(n) < 0.3  # noqa: PLR2004 - some
        odd_values = odd[random.integers(len(odd), size=n)]
        return np.where(is_odd, odd_values, counts.astype(odd.dtype)).astype(dtype)

    def _random(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])


def _odd_values(dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([limits.min, limits.max, limits.max // 2 + 1, limits.max // 3], dtype)
    numbers = np.finfo(dtype)
    odd = [numbers.min, numbers.max, numbers.tiny, -0.0, 0.1, np.inf, -np.inf, np.nan]
    return np.array(odd, dtype)


# Memory that detects writes outside of its bounds.

_GUARD_BYTES = 256
_MARK = 0xA5


class GuardedPool(BufferPool):
    """A pool whose buffers have exactly the requested size, with marked bytes on both sides.

    The buffers are filled with marks as well, so unwritten bytes are visible. No buffer is
    reused.

    Examples
    --------
    >>> pool = GuardedPool()
    >>> pool.acquire(3).array(np.dtype("uint8"), 4)[:] = 1
    >>> pool.check()
    Traceback (most recent call last):
    AssertionError: bytes were written outside of 3 bytes of memory
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[NDArray[np.uint8]] = []

    def acquire(self, n_bytes: int) -> Buffer:
        """Return memory of exactly ``n_bytes``."""
        piece = np.full(n_bytes + 2 * _GUARD_BYTES, _MARK, np.uint8)
        self._pieces.append(piece)
        return Buffer(piece[_GUARD_BYTES : _GUARD_BYTES + n_bytes])

    def check(self) -> None:
        """Check that nothing was written outside of the buffers.

        Raises
        ------
        AssertionError
            Bytes outside of a buffer were written.
        """
        for piece in self._pieces:
            sides = piece[:_GUARD_BYTES], piece[piece.size - _GUARD_BYTES :]
            if any((side != _MARK).any() for side in sides):
                n_bytes = piece.size - 2 * _GUARD_BYTES
                msg = f"bytes were written outside of {n_bytes} bytes of memory"
                raise AssertionError(msg)


# Running the checks of a suite over examples that hypothesis draws.


def for_all(
    check: Callable[..., None], *, max_examples: int, **drawn: st.SearchStrategy[Any]
) -> None:
    """Call ``check`` with drawn arguments, the same in each run.

    This is not a decorator of the tests, since they draw from attributes of the subclass.

    Parameters
    ----------
    check
        The function with assertions.
    max_examples
        Maximum number of calls; a hypothesis profile may lower it.
    **drawn
        Strategies of the arguments.
    """
    configured = settings(
        max_examples=min(max_examples, settings().max_examples),
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    configured(given(**drawn)(check))()
