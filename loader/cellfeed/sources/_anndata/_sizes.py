"""Sizes in the metadata of tables, checked before memory is allocated for them.

A table takes memory for the rows of its matrix, or for its bytes in the file, but not for the sizes
that its metadata state: chunks that do not exist are read as zeros or empty text, however many they
are.
"""

from __future__ import annotations

import math
from typing import Any

import h5py

from cellfeed import decode
from cellfeed._errors import FormatError
from cellfeed.sources._anndata._file import (
    AnnDataFile,
    index_of,
    is_group,
    text,
    texts,
)

_ALWAYS = 1 << 26  # bytes in memory that any array may take
_BYTES_PER_ROW = 16  # that a column may take; complex numbers have as many
_OLD_CATEGORIES = "__categories"  # of all columns, in anndata before 0.8
_COMPRESSION = 4096  # bytes in memory for each in the file; gzip reaches 1,032


def table_length(file: AnnDataFile, name: str) -> int:
    """Return the number of rows of a table such as ``obs``, without reading them."""
    table = file.stored(name)
    if not is_group(table):  # anndata before 0.7
        return _length(table)
    index = file.stored(f"{name}/{index_of(table)}")
    if is_group(index):
        index = index["codes" if "codes" in index else "values"]
    return _length(index)


def check_sizes(file: AnnDataFile, name: str, n_rows: int | None = None) -> None:
    """Check the sizes of an element that is about to be read as a whole.

    Parameters
    ----------
    file, name
        The file, and the path of an array, a table, a column, or a group of these.
    n_rows
        Number of its rows, if that is known: of the table, if it is a column.

    Raises
    ------
    FormatError
        An array has another number of rows, or the file has too few bytes for its size.
    """
    stored = file.stored(name)
    if not is_group(stored):
        _check_array(file, name, stored, n_rows)
        return
    encoding = text(stored, "encoding-type")
    if encoding == "dataframe":
        n_rows = table_length(file, name) if n_rows is None else n_rows
        for column in dict.fromkeys([index_of(stored), *texts(stored, "column-order")]):
            check_sizes(file, f"{name}/{column}", n_rows)
        if _OLD_CATEGORIES in stored:
            check_sizes(file, f"{name}/{_OLD_CATEGORIES}")
    elif encoding == "categorical":
        check_sizes(file, f"{name}/codes", n_rows)
        _check_categories(file, f"{name}/categories", n_rows)
    elif encoding.startswith("nullable-"):
        n_rows = _length(file.stored(f"{name}/mask")) if n_rows is None else n_rows
        for part in ("values", "mask"):
            check_sizes(file, f"{name}/{part}", n_rows)
    else:
        for each in stored:
            check_sizes(file, f"{name}/{each}")


def _check_categories(file: AnnDataFile, name: str, n_rows: int | None) -> None:
    stored = file.stored(name)
    if is_group(stored):  # nullable text
        check_sizes(file, name)
        return
    _check_array(file, name, stored, None, n_rows or 0)
    n_lost = file.n_absent(name)
    if n_lost > 1:  # they would all be the same category
        raise _refused(file, f"`{name}` lacks {n_lost:,} of its chunks")


def _check_array(
    file: AnnDataFile, name: str, stored: Any, n_rows: int | None, n_expected: int = 0
) -> None:
    shape, itemsize = tuple(map(int, stored.shape)), int(stored.dtype.itemsize)
    if n_rows is not None and shape[:1] != (n_rows,):
        n_here = shape[0] if shape else 0
        raise _refused(file, f"`{name}` has {n_here:,} rows, but its table has {n_rows:,}")
    if stored.chunks is not None:
        shards = None if isinstance(stored, h5py.Dataset) else stored.shards
        decode.check_grid(shape, stored.chunks, itemsize, shard_shape=shards)
    n_bytes = math.prod(shape) * itemsize
    if n_bytes > max(_ALWAYS, _BYTES_PER_ROW * (n_rows or n_expected)):
        n_there = file.bytes_there(name)
        compression = 1 if stored.chunks is None else _COMPRESSION
        if n_there is not None and n_bytes > n_there * compression:
            what = f"`{name}` should have {shape} values, for which it has {n_there:,} bytes"
            raise _refused(file, what)
    file.check_texts(name)


def _length(stored: Any) -> int:
    return int(stored.shape[0]) if stored.shape else 0


def _refused(file: AnnDataFile, what: str) -> FormatError:
    return FormatError(f"{file.location}: {what}; copy or download it again, or write it again")
