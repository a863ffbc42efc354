"""Columns of lists in row groups of Parquet files: their pages, decoded without a library.

This is for lists of numbers with the encodings that writers choose by themselves: plain, or indices
into a dictionary. What is encoded in another way, has gaps or is damaged is left to pyarrow.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import BufferPool
from cellfeed.decode import can_decode, chunk_codec, function_addresses
from cellfeed.decode import kernels as decoding
from cellfeed.sources import Runs, count_rows, expand
from cellfeed.sources.arrow import values_of
from cellfeed.storages.parquet import _kernels as kernels
from cellfeed.storages.parquet._kernels import _fields as fields

# Names of codecs, by their numbers in footers.
CODECS = ("none", "snappy", "gzip", "lzo", "brotli", "lz4_hadoop", "zstd", "lz4")

_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8  # encodings
DECODED = 1 << _PLAIN | 1 << _PLAIN_DICTIONARY | 1 << _RLE | 1 << _RLE_DICTIONARY
_ITEMSIZES = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
_MOST_BYTES = 1 << 28  # of a column in a row group, which is decoded at once


def describe_lists(chunks: NDArray[np.int64], column: Any, field: Any) -> None:
    """Describe a column of lists of numbers, in those row groups where it is decoded here.

    Parameters
    ----------
    chunks
        What the footer says of it, as `fields` lists it, shape (n_groups, N_CHUNK_FIELDS); its last
        three fields are filled.
    column, field
        Its `pyarrow.parquet.ColumnSchema`, and the `pyarrow.Field` of the lists.
    """
    from pyarrow import types  # noqa: PLC0415 - optional

    value = values_of(field.type.value_type)
    itemsize, is_float = _ITEMSIZES.get(column.physical_type, 0), types.is_floating(value)
    if is_float:
        fits = value.bit_width == 8 * itemsize
    else:
        fits = types.is_integer(value) and value.bit_width <= 8 * itemsize
    fits &= (column.physical_type in ("FLOAT", "DOUBLE")) == is_float
    empty = int(field.nullable)
    most = empty + 1 + int(field.type.value_field.nullable)
    fits &= types.is_list(field.type) or types.is_large_list(field.type)
    fits &= (column.max_repetition_level, column.max_definition_level) == (1, most)
    known = [codec for codec, name in enumerate(CODECS) if _can_decode(name)]
    sizes = chunks[:, [fields.CHUNK_BYTES, fields.STORED_BYTES]].max(axis=1)
    is_here = np.isin(chunks[:, fields.CHUNK_CODEC], known) & (sizes <= _MOST_BYTES) & fits
    is_here &= chunks[:, fields.ENCODINGS] & ~DECODED == 0
    chunks[is_here, fields.CHUNK_ITEMSIZE :] = itemsize, most, empty


def _can_decode(codec: str) -> bool:
    is_known = codec in ("none", "gzip", "zstd", "lz4") and can_decode(chunk_codec(codec))
    return is_known or codec == "snappy"


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Wanted rows of a column of lists in a row group, whose pages are decompressed.

    Parameters
    ----------
    lengths
        Number of values of each row, int64, shape (n_rows,).
    dtype
        Dtype of decoded values: int32 for columns; otherwise that of the column or, if its values
        are stored in more bytes, the signed integers of so many.
    pages, column
        The table of its pages, and its description for compiled code.
    pieces
        Values of a row in a page, a table for compiled code.
    memory
        The decompressed pages.
    numbers
        The column of each gene number; empty if values are none.
    dictionary
        The values of its dictionary.
    """

    lengths: NDArray[np.int64]
    dtype: np.dtype[Any]
    pages: NDArray[np.int64]
    column: NDArray[np.int64]
    pieces: NDArray[np.int64]
    memory: NDArray[np.uint8]
    numbers: NDArray[np.int32]
    dictionary: NDArray[Any]

    @classmethod
    def open(
        cls,
        data: NDArray[np.uint8],
        chunk: NDArray[np.int64],
        n_rows: int,
        runs: Runs,
        pool: BufferPool,
        dtype: np.dtype[Any],
        numbers: NDArray[np.int32] | None = None,
    ) -> Self | None:
        """Decompress pages, and find the lengths of rows; None if only pyarrow can.

        Parameters
        ----------
        data
            The bytes of the column, from its first page on.
        chunk
            What the footer says of it, as `fields` lists it, and `describe_lists`.
        n_rows
            Number of rows of the row group.
        runs
            Ascending, disjoint runs of rows of the row group, at least one.
        pool
            Where memory is taken from.
        dtype
            Dtype of the values of the column.
        numbers
            If values are gene numbers, the column of each, int32, shape (n + 1,): the last one is
            for numbers from n on. Negative numbers have column -1.
        """
        itemsize = int(chunk[fields.CHUNK_ITEMSIZE])
        sizes = int(chunk[fields.N_CHUNK_ENTRIES]), int(chunk[fields.CHUNK_BYTES])
        pages, n = np.empty((_FEW, fields.N_PAGE_COLUMNS), np.int64), _FEW + 1
        while n > len(pages):
            n = kernels.find_pages(data.ctypes.data, data.size, *sizes, pages)
            if n > len(pages):
                pages, n = np.empty((n, fields.N_PAGE_COLUMNS), np.int64), n + 1
        if n < 0:
            return None
        pages = pages[:n]
        dictionaries = np.flatnonzero(pages[:, fields.KIND] == fields.DICTIONARY_PAGE)
        n_distinct = int(pages[dictionaries, fields.N_PAGE_ROWS].sum())
        n_bytes = int(pages[dictionaries, fields.PAGE_SIZE].sum())
        if dictionaries.any() or dictionaries.size > 1 or n_bytes != n_distinct * itemsize:
            return None  # there is at most one, and it comes first
        column = np.empty(fields.N_LIST_FIELDS, np.int64)
        column[fields.MOST], column[fields.EMPTY] = chunk[[fields.CHUNK_MOST, fields.CHUNK_EMPTY]]
        column[fields.LIST_ITEMSIZE], column[fields.N_ROWS] = itemsize, n_rows
        column[fields.N_DISTINCT] = n_distinct
        codec = CODECS[chunk[fields.CHUNK_CODEC]]
        is_snappy = codec == "snappy"
        column[fields.LIST_DECOMPRESS] = (
            kernels.snappy.address if is_snappy else decoding.decompressor(chunk_codec(codec))
        )
        if numbers is not None:
            dtype = np.dtype(np.int32)
        elif itemsize > dtype.itemsize:
            dtype = np.dtype(f"i{itemsize}")
        word, n_words = np.dtype(f"u{dtype.itemsize}"), 1 << max(1, n_distinct - 1).bit_length()
        dictionary = pool.acquire(n_words * word.itemsize).array(word, n_words)
        n_bytes = int(pages[:, fields.PAGE_SIZE].sum()) + fields.PADDING
        memory = pool.acquire(n_bytes).array(np.dtype(np.uint8), n_bytes)
        numbers = _NONE if numbers is None else numbers
        lengths = np.zeros(count_rows(runs), np.int64)
        pieces = np.empty((lengths.size + n, fields.N_LIST_PIECE_COLUMNS), np.int64)
        n = kernels.open_lists(
            data.ctypes.data, data.size, pages, column, np.ascontiguousarray(runs), lengths, pieces,
            function_addresses(), memory, numbers, dictionary,
        )  # fmt: skip
        if n < 0:
            return None
        return cls(lengths, dtype, pages, column, pieces[:n], memory, numbers, dictionary)

    @property
    def n_bytes(self) -> int:
        """Memory that it takes, but for rows, in bytes."""
        return self.memory.nbytes + self.dictionary.nbytes + self.pages.nbytes

    def rows(self, runs: Runs) -> Self:
        """Return some of the rows; runs as in `open`, among these rows."""
        rows = expand(runs)
        starts = np.searchsorted(self.pieces[:, fields.ROW], [rows, rows + 1])
        pieces = self.pieces[expand(starts.T)]
        pieces[:, fields.ROW] = np.repeat(np.arange(rows.size), starts[1] - starts[0])
        return replace(self, lengths=self.lengths[rows], pieces=pieces)

    def firsts(self) -> NDArray[Any] | None:
        """Return the first value of each row that has any; None if only pyarrow can."""
        pieces = self.pieces[np.diff(self.pieces[:, fields.ROW], prepend=-1) > 0]
        pieces[:, fields.N_ELEMENTS] = 1
        found = np.empty(len(pieces), self.dtype)
        addresses = found.ctypes.data + np.arange(found.size) * self.dtype.itemsize
        return None if self._write(pieces, addresses, are_columns=False) < 0 else found

    def write(self, addresses: NDArray[np.int64], skipped: NDArray[np.int64]) -> bool | None:
        """Write the values of each row to an address.

        Parameters
        ----------
        addresses
            Where each row is written, int64, shape (n_rows,).
        skipped
            Number of values at the beginning of each row that are left out, int64, shape (n_rows,).

        Returns
        -------
        Whether columns ascend strictly in each row, True for other values; None if only pyarrow
        can, or if a column is negative.
        """
        pieces, rows = self.pieces.copy(), self.pieces[:, fields.ROW]
        n = pieces[:, fields.N_ELEMENTS]
        before = np.cumsum(n) - n - (np.cumsum(self.lengths) - self.lengths)[rows]
        left_out = np.clip(skipped[rows] - before, 0, n)
        to = addresses[rows] + (before + left_out - skipped[rows]) * self.dtype.itemsize
        pieces[:, fields.FIRST] += left_out
        pieces[:, fields.N_ELEMENTS] -= left_out
        ascend = self._write(pieces, to, are_columns=self.numbers.size > 0)
        return None if ascend < 0 else ascend > 0

    def _write(
        self, pieces: NDArray[np.int64], addresses: NDArray[np.int64], *, are_columns: bool
    ) -> int:
        tables = self.memory, self.pages, self.column, pieces, addresses
        return int(kernels.write_lists(*tables, self.numbers, self.dictionary, are_columns))


_FEW = 16  # pages that most columns do not exceed
_NONE = np.empty(0, np.int32)
