"""The matrix of one part in memory: filled in storage order, taken out in shuffled order."""

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._compiled import compiled

_COUNTS = np.dtype(np.uint16)

_LARGEST_COUNT = np.iinfo(_COUNTS).max

_PIECE = 1 << 16  # elements; several arrays of as many are in the cache

_COPY = [
    f"void({word}[::1], int64[::1], int64[::1], int64, {word}[::1])"
    for word in ("uint8", "uint16", "uint32", "uint64")
]


@compiled(*_COPY)
def _copy(source: Any, firsts: Any, pointer: Any, start: Any, out: Any) -> None:
    """Copy elements ``start`` and following of rows that are taken in another order.

    Row k begins at ``firsts[k]`` in ``source``, and at ``pointer[k]`` in the new order.
    """
    row = np.searchsorted(pointer, start, side="right") - 1
    filled = 0
    while filled < out.size:
        skipped = start + filled - pointer[row]
        n = min(pointer[row + 1] - pointer[row] - skipped, out.size - filled)
        first = firsts[row] + skipped
        for k in range(n):
            out[filled + k] = source[first + k]
        filled += n
        row += 1


def _are_counts(values: NDArray[np.floating[Any]]) -> bool:
    """Return whether values from 0 to 65,535 are integers without -0."""
    counts = values.astype(np.uint16)
    return bool((counts == values).all() and not np.signbit(values).any())


def _largest_count(values: NDArray[Any]) -> int | None:
    """Return the largest value if all are whole numbers from 0 to 65,535, else None."""
    largest = 0
    for start in range(0, values.size, _PIECE):
        piece = values[start : start + _PIECE]
        if not 0 <= piece.min() <= piece.max() <= _LARGEST_COUNT:  # not if one is NaN
            return None
        if piece.dtype.kind == "f" and not _are_counts(piece):
            return None
        largest = max(largest, int(piece.max()))
    return largest


def _widen(values: NDArray[Any], n: int) -> None:
    """Convert n counts at the start of the memory of ``values`` to its dtype, in place."""
    counts = values.view(_COUNTS)
    for stop in range(n, 0, -_PIECE):  # backwards: a value lies where its count did, or behind it
        start = max(0, stop - _PIECE)
        values[start:stop] = counts[start:stop].copy()


class CsrPart:
    """Sparse rows: few bytes per element, and no second copy.

    Parameters
    ----------
    n_rows
        Number of rows in the part.
    n_elements
        Estimated number of elements. More fit, at the cost of a copy.
    dtype, index_dtype
        Dtypes of values and of column indices.
    counts
        Whether to detect values that are whole numbers from 0 to 65,535. As long as all are, they
        are kept as uint16, at the start of the memory that they might need.
    """

    def __init__(
        self,
        n_rows: int,
        n_elements: int,
        dtype: "np.dtype[Any]",
        index_dtype: "np.dtype[np.unsignedinteger]",
        *,
        counts: bool,
    ) -> None:
        self._lengths = np.empty(n_rows, dtype=np.int64)
        self._dtypes: dict[str, np.dtype[Any]] = {"data": dtype, "indices": index_dtype}
        self._largest = 0 if counts else None
        is_wider = _COUNTS.itemsize < dtype.itemsize and np.can_cast(_COUNTS, dtype)
        self._is_narrow = counts and is_wider
        # Memory that is not written to is not taken, so there is room to spare.
        room = n_elements + n_elements // 4 + 1
        self._arrays: dict[str, NDArray[Any]] = {
            "data": np.empty(room, dtype=dtype),
            "indices": np.empty(room, dtype=index_dtype),
        }
        self._n_rows = 0
        self._n_elements = 0

    def append(self, rows: sp.csr_array) -> None:
        """Add the next rows in storage order."""
        n_rows, n_elements = self._n_rows + rows.shape[0], self._n_elements + rows.indices.size
        self._lengths[self._n_rows : n_rows] = np.diff(rows.indptr)
        if self._largest is not None:
            largest = _largest_count(rows.data)
            self._largest = None if largest is None else max(self._largest, largest)
            if largest is None and self._is_narrow:
                _widen(self._arrays["data"], self._n_elements)
                self._is_narrow = False
        self._make_room(n_elements)
        for name, array in self._held().items():
            array[self._n_elements : n_elements] = getattr(rows, name)
        self._n_rows, self._n_elements = n_rows, n_elements

    def _make_room(self, n_elements: int) -> None:
        if self._arrays["data"].size >= n_elements:
            return
        for name, dtype in self._dtypes.items():
            held = self._held()[name][: self._n_elements]
            room = np.empty(n_elements + n_elements // 4, dtype)
            room.view(held.dtype)[: held.size] = held
            self._arrays[name] = room

    def _held(self) -> dict[str, NDArray[Any]]:
        """Return the elements in the dtype in which they are kept."""
        data = self._arrays["data"]
        return {**self._arrays, "data": data.view(_COUNTS) if self._is_narrow else data}

    def shuffled(self, order: NDArray[np.intp]) -> "ShuffledCsr":
        """Return the rows in another order, without a copy of them."""
        return ShuffledCsr(self._held(), self._dtypes, self._lengths, order, self._largest)


class ShuffledCsr:
    """Sparse rows in another order than in memory."""

    def __init__(
        self,
        arrays: dict[str, NDArray[Any]],
        dtypes: "dict[str, np.dtype[Any]]",
        lengths: NDArray[np.int64],
        order: NDArray[np.intp],
        largest_count: int | None,
    ) -> None:
        self._arrays, self._dtypes = arrays, dtypes
        self._firsts = (np.cumsum(lengths) - lengths)[order]
        self.pointer = np.zeros(order.size + 1, dtype=np.int64)
        np.cumsum(lengths[order], out=self.pointer[1:])
        self.largest_count = largest_count
        """The largest value if all are known to be whole numbers from 0 to 65,535, else None."""

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return int(self.pointer[-1])

    def dtype(self, name: str) -> "np.dtype[Any]":
        """Return the dtype of ``data`` or ``indices``; counts may be kept in a narrower one."""
        return self._dtypes[name]

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return elements ``[start, stop)`` of ``data`` or ``indices`` in the new order."""
        array = self._arrays[name]
        out = np.empty(stop - start, dtype=array.dtype)
        word = f"u{array.dtype.itemsize}"
        _copy(array.view(word), self._firsts, self.pointer, start, out.view(word))
        return out


class DensePart:
    """Dense rows.

    Parameters
    ----------
    shape, dtype
        Shape and dtype of the part.
    """

    def __init__(self, shape: tuple[int, int], dtype: "np.dtype[Any]") -> None:
        self._rows = np.empty(shape, dtype=dtype)
        self._n_rows = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Add the next rows in storage order."""
        self._rows[self._n_rows : self._n_rows + len(rows)] = rows
        self._n_rows += len(rows)

    def shuffled(self, order: NDArray[np.intp]) -> "ShuffledDense":
        """Return the rows in another order, without a copy of them."""
        return ShuffledDense(self._rows, order)


class ShuffledDense:
    """Dense rows in another order than in memory."""

    def __init__(self, rows: NDArray[Any], order: NDArray[np.intp]) -> None:
        self._rows, self._order = rows, order
        self.shape, self.dtype = rows.shape, rows.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` in the new order."""
        chosen: NDArray[Any] = self._rows[self._order[start:stop]]
        return chosen


Matrix = ShuffledCsr | ShuffledDense
