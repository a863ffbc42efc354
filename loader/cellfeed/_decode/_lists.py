"""Columns of lists in row groups of Parquet files: their pages, decoded without a library.

This is for lists of numbers with the encodings that writers choose by themselves: plain, or indices
into a dictionary. What is encoded in another way, has gaps or is damaged is left to pyarrow.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._buffers import BufferPool
from cellfeed._decode import _kernels as kernels
from cellfeed._decode._kernels import _fields as fields
from cellfeed._decode._kernels._codecs import PARQUET_CODECS, can_decode, function_addresses
from cellfeed._runs import Runs, count_rows

# What a footer says of a column of lists in a row group: its codec, -1 if only pyarrow can decode
# the column; definition levels of a value and of an empty list; bytes of a value in pages; number
# of values and of lists without any; size of all pages, decompressed, in bytes.
_CODEC, _MOST, _EMPTY, _ITEMSIZE, _N_ENTRIES, _N_BYTES = range(6)
LIST_NUMBERS = 6

_ITEMSIZES = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
_ENCODINGS = {"PLAIN", "RLE", "RLE_DICTIONARY", "PLAIN_DICTIONARY"}
_MOST_BYTES = 1 << 28  # of a column in a row group, which is decoded at once


def list_numbers(chunk: Any, column: Any, field: Any, dtype: np.dtype[Any]) -> list[int]:
    """Return what is needed to decode a column of lists in a row group, `LIST_NUMBERS` integers.

    Parameters
    ----------
    chunk
        Its `pyarrow.parquet.ColumnChunkMetaData`.
    column, field
        Its `pyarrow.parquet.ColumnSchema`, and the `pyarrow.Field` of the lists.
    dtype
        Dtype of its values.
    """
    from pyarrow import types  # noqa: PLC0415 - optional

    itemsize = _ITEMSIZES.get(column.physical_type, 0)
    is_list = types.is_list(field.type) or types.is_large_list(field.type)
    is_known = is_list and itemsize > 0 and column.max_repetition_level == 1
    if dtype.kind == "f":
        is_known &= column.physical_type in ("FLOAT", "DOUBLE") and itemsize == dtype.itemsize
    elif dtype.kind in "iu":
        is_known &= column.physical_type in ("INT32", "INT64") and itemsize >= dtype.itemsize
    codec = PARQUET_CODECS.get(chunk.compression.lower(), -1)
    is_known &= codec >= 0 and can_decode(codec) and {*chunk.encodings} <= _ENCODINGS
    n_bytes = chunk.total_uncompressed_size
    is_known &= max(n_bytes, chunk.total_compressed_size) <= _MOST_BYTES
    if not is_known:
        return [-1] * LIST_NUMBERS
    empty = int(field.nullable)
    most = empty + 1 + int(field.type.value_field.nullable)
    codec = codec if column.max_definition_level == most else -1
    return [codec, most, empty, itemsize, chunk.num_values, n_bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Wanted rows of a column of lists in a row group.

    Parameters
    ----------
    data, pages
        The bytes of the column, and the table of its pages.
    column
        Its description for compiled code.
    runs
        The rows.
    lengths
        Number of values of each row, int64, shape (n_rows,).
    memory
        Where memory is taken from.
    """

    data: NDArray[np.uint8]
    pages: NDArray[np.int64]
    column: NDArray[np.int64]
    runs: Runs
    lengths: NDArray[np.int64]
    memory: BufferPool

    @classmethod
    def find(
        cls,
        data: NDArray[np.uint8],
        numbers: NDArray[np.int64],
        n_rows: int,
        runs: Runs,
        memory: BufferPool,
    ) -> Self | None:
        """Find the lengths of rows; None if only pyarrow can.

        Parameters
        ----------
        data
            The bytes of the column, from its first page on.
        numbers
            What `list_numbers` returned.
        n_rows
            Number of rows of the row group.
        runs
            Ascending, disjoint runs of rows of the row group, at least one.
        memory
            Where memory is taken from.
        """
        if numbers[_CODEC] < 0:
            return None
        described = int(numbers[_N_ENTRIES]), int(numbers[_N_BYTES])
        pages, n = np.empty((_FEW, fields.N_PAGE_COLUMNS), np.int64), _FEW + 1
        while n > len(pages):
            n = kernels.find_pages(data.ctypes.data, data.size, *described, pages)
            if n > len(pages):
                pages, n = np.empty((n, fields.N_PAGE_COLUMNS), np.int64), n + 1
        if n < 0:
            return None
        column = np.empty(fields.N_LIST_FIELDS, np.int64)
        column[fields.MOST], column[fields.EMPTY] = numbers[[_MOST, _EMPTY]]
        column[fields.LIST_ITEMSIZE], column[fields.N_ROWS] = numbers[_ITEMSIZE], n_rows
        column[fields.LIST_DECOMPRESS] = kernels.decompressor(int(numbers[_CODEC]))
        lengths, runs = np.zeros(count_rows(runs), np.int64), np.ascontiguousarray(runs)
        found = cls(data, pages[:n], column, runs, lengths, memory)
        return found if found._read(lengths, _NO_NUMBERS, np.empty(0, np.uint32)) >= 0 else None

    def values(
        self, dtype: np.dtype[Any], numbers: NDArray[np.int32] | None = None
    ) -> NDArray[Any] | None:
        """Return the values of all rows, one after the other; None if only pyarrow can.

        Parameters
        ----------
        dtype
            Their dtype; int32 if ``numbers`` is given.
        numbers
            Return the entry of each value instead, int32, shape (n + 1,): the last one for values
            from n on, and -1 for negative ones.
        """
        n = int(self.lengths.sum())
        itemsize = int(self.column[fields.LIST_ITEMSIZE]) if numbers is None else dtype.itemsize
        words = self.memory.acquire(n * itemsize).array(np.dtype(f"u{itemsize}"), n)
        numbers = _NO_NUMBERS if numbers is None else numbers
        if n and self._read(np.zeros_like(self.lengths), numbers, words) != n:
            return None
        # Small integers are stored in more bytes, of which the first ones are theirs.
        return words.view(f"{'f' if dtype.kind == 'f' else 'i'}{itemsize}").astype(
            dtype, copy=False
        )

    def _read(
        self, lengths: NDArray[np.int64], numbers: NDArray[np.int32], out: NDArray[Any]
    ) -> int:
        n_bytes = int(self.pages[:, fields.PAGE_SIZE].max(initial=0)) + fields.PADDING
        buffer = self.memory.acquire(n_bytes).array(np.dtype(np.uint8), n_bytes)
        data = self.data.ctypes.data, self.data.size
        tables = self.pages, self.column, self.runs, lengths
        return int(kernels.read_lists(*data, *tables, function_addresses(), buffer, numbers, out))


_FEW = 16  # pages that most columns do not exceed
_NO_NUMBERS = np.empty(0, np.int32)
