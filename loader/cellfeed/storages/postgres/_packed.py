"""Rows that are compressed one by one, for storage in a database.

A packed row is a header of 12 bytes, and one zstd frame with a checksum. All numbers are
little-endian. The header:

======= ======================================================================================
byte    what
======= ======================================================================================
0       version of this layout: 1
1       codec: 1 for zstd
2       bytes of a column difference: 1, 2 or 4; 0 for a dense row, which has none
3       kind of the values, as NumPy names it: "u", "i", "f" or "b"
4       bytes of a value
5 to 7  0
8 to 11 number of values
======= ======================================================================================

The frame contains the differences of neighbouring columns, the first from 0, and then the values;
both are byte-shuffled, with the lowest bytes of all numbers first, then the next ones. Columns
ascend. Values that are all integers from 0 to 2^32 - 1, whatever their dtype, have kind "u" and the
smallest possible width (1, 2 or 4 bytes); others are stored unchanged.
"""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.decode import function_addresses
from cellfeed.storages.postgres import _kernels as kernels

_VERSION, _ZSTD = 1, 1
_LEVEL = 1
_HEADER = struct.Struct("<BBBcB3xI")


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


def pack_row(columns: NDArray[np.integer] | None, values: NDArray[Any]) -> bytes:
    """Pack one row.

    Parameters
    ----------
    columns
        Strictly ascending columns, shape (n,); None for a dense row.
    values
        Values of any numeric dtype, shape (n,).

    Examples
    --------
    >>> packed = pack_row(np.array([3, 7]), np.array([1, 2], np.float32))
    >>> unpack_rows([packed], np.dtype(np.float32), 9)
    (array([0, 2]), array([3, 7], dtype=int32), array([1., 2.], dtype=float32))
    """
    steps = np.empty(0, np.uint8)
    if columns is not None:
        steps = _narrow(np.diff(columns.astype(np.int64, copy=False), prepend=0))
    stored = (
        _narrow(values) if _are_small(values) else values.astype(values.dtype.newbyteorder("<"))
    )
    header = _HEADER.pack(
        _VERSION,
        _ZSTD,
        0 if columns is None else steps.itemsize,
        stored.dtype.kind.encode(),
        stored.itemsize,
        values.size,
    )
    return header + bytes(_zstd().encode(_planes(steps) + _planes(stored)))


def unpack_rows(
    packed: Sequence[bytes], dtype: np.dtype[Any], n_columns: int, *, is_dense: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
    """Unpack rows, without the GIL.

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
    n_rows = len(packed)
    sizes = np.fromiter(map(len, packed), np.int64, n_rows)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    buffer = np.frombuffer(bytearray().join(packed), np.uint8)
    indptr, is_raw = np.zeros(n_rows + 1, np.int64), np.zeros(n_rows, np.bool_)
    _check(kernels.count_packed(buffer, starts, dtype.itemsize, n_columns, indptr[1:], is_raw))
    np.cumsum(indptr, out=indptr)
    n = int(indptr[-1])
    indices = np.empty(0 if is_dense else n, np.int32)
    small = np.empty(0 if is_raw.all() else n, np.uint32)
    raw = np.empty(n * dtype.itemsize if is_raw.any() else 0, np.uint8)
    rows = buffer, starts, dtype.itemsize, n_columns, indptr, is_raw
    _check(kernels.unpack(*rows, indices, small, raw, function_addresses()))
    if not raw.size:
        return indptr, indices, small.astype(dtype)
    values = raw.view(dtype.newbyteorder("<")).astype(dtype, copy=False)
    if small.size:
        are_small = np.repeat(~is_raw, np.diff(indptr))
        values[are_small] = small[are_small]
    return indptr, indices, values


def _are_small(values: NDArray[Any]) -> bool:
    if values.dtype.kind not in "iuf":
        return False
    if values.dtype.kind == "f" and np.signbit(values).any():  # -0.0 is no integer
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        whole = values.astype(np.uint64)
        return bool(np.all(whole.astype(values.dtype) == values) and whole.max(initial=0) < 1 << 32)


def _narrow(values: NDArray[Any]) -> NDArray[np.unsignedinteger]:
    most = int(values.max()) if values.size else 0
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4
    return values.astype(f"<u{width}")


def _planes(values: NDArray[Any]) -> bytes:
    """Return the lowest bytes of all values, then the next ones."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes() if values.size else b""


def _check(row: int) -> None:
    if row >= 0:
        raise PackedRowError(row)
