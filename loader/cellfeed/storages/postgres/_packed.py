"""Rows that are compressed one by one, for storage in a database.

A packed row is one zstd frame with a checksum. It contains the number of bytes of a value (one
byte; 0 for values of the element's own dtype), the differences of neighbouring columns (the first
from 0; none in a dense row), and the values. Columns ascend, and their differences have the
narrowest of 1, 2 or 4 bytes that suffices for all columns of the element. Values that are all
integers from 0 to 255 have one byte, whatever their dtype. Differences and values are
byte-shuffled: first the lowest bytes of all numbers, then the next ones. All are little-endian.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEVEL = 1


class PackedRowError(ValueError):
    """A packed row is damaged.

    Parameters
    ----------
    row
        Index of the row among the given ones.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"packed row {row} is damaged")
        self.row = row


@cache
def _zstd() -> Any:
    from numcodecs import Zstd  # noqa: PLC0415 - takes long to import

    return Zstd(level=_LEVEL, checksum=True)


def _width(n_columns: int, *, is_dense: bool) -> int:
    """Return the number of bytes of a difference of columns."""
    return 0 if is_dense else np.min_scalar_type(max(0, n_columns - 1)).itemsize


def pack_row(columns: NDArray[np.integer] | None, values: NDArray[Any], n_columns: int) -> bytes:
    """Pack one row.

    Parameters
    ----------
    columns
        Strictly ascending columns, shape (n,); None for a dense row.
    values
        Values of any numeric dtype, shape (n,).
    n_columns
        Number of columns of the element, at most 2^31.

    Examples
    --------
    >>> packed = pack_row(np.array([3, 7]), np.array([1, 2], np.float32), 9)
    >>> unpack_rows([packed], np.dtype(np.float32), 9)
    (array([0, 2]), array([3, 7], dtype=int32), array([1., 2.], dtype=float32))
    """
    with np.errstate(invalid="ignore", over="ignore"):
        small = values.astype(np.uint8)
    is_small = small.astype(values.dtype).tobytes() == values.tobytes()  # -0.0 is not
    content = b"\1" if is_small else b"\0"
    if columns is not None:
        width = _width(n_columns, is_dense=False)
        content += _planes(np.diff(columns, prepend=0).astype(f"<u{width}"))
    content += _planes(small if is_small else values.astype(values.dtype.newbyteorder("<")))
    return bytes(_zstd().encode(content))


def _planes(values: NDArray[Any]) -> bytes:
    """Return the lowest bytes of all values, then the next ones."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes() if values.size else b""


def unpack_rows(
    packed: Sequence[bytes], dtype: np.dtype[Any], n_columns: int, *, is_dense: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
    """Unpack rows.

    Parameters
    ----------
    packed
        The packed rows.
    dtype
        Dtype of the values.
    n_columns
        Number of columns.
    is_dense
        Whether rows are dense.

    Returns
    -------
    Row pointers, columns (empty for dense rows) and values.

    Raises
    ------
    PackedRowError
        A row is damaged.
    """
    width, counts = _width(n_columns, is_dense=is_dense), np.empty(len(packed), np.int64)
    rows, values = list[bytes](), [np.empty(0, dtype)]
    for k, each in enumerate(packed):
        try:
            row = _zstd().decode(each)
            kind = {0: dtype.newbyteorder("<"), 1: np.dtype(np.uint8)}[row[0]]
        except (RuntimeError, ValueError, LookupError, MemoryError, OverflowError):
            raise PackedRowError(k) from None
        n, remainder = divmod(len(row) - 1, width + kind.itemsize)
        if remainder or n > n_columns or (is_dense and n != n_columns):
            raise PackedRowError(k)
        planes = np.frombuffer(row, np.uint8, n * kind.itemsize, 1 + n * width)
        values.append(planes.reshape(kind.itemsize, n).T.ravel().view(kind))
        rows.append(row)
        counts[k] = n
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = np.zeros(0 if is_dense else indptr[-1], np.int32)
    if indices.size:
        sizes = counts.tolist()
        for byte in range(width):
            own = (
                row[1 + byte * n : 1 + (byte + 1) * n] for row, n in zip(rows, sizes, strict=True)
            )
            plane = np.frombuffer(b"".join(own), np.uint8).astype(np.int32)
            indices |= plane << 8 * byte
        np.cumsum(indices, out=indices)  # it wraps around, and so does what is subtracted
        before = np.concatenate([np.zeros(1, np.int32), indices])[indptr[:-1]]
        indices -= np.repeat(before, counts)
        outside = np.flatnonzero((indices < 0) | (indices >= n_columns))
        if outside.size:
            raise PackedRowError(int(np.searchsorted(indptr, outside[0], side="right")) - 1)
    return indptr, indices, np.concatenate(values, dtype=dtype, casting="unsafe")
