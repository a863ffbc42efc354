"""obs, var and other tables of AnnData files of any version.

Columns are read one by one, as anndata has written them since 0.7. anndata reads older tables,
which are one compound dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._lazy import pd
from cellfeed._runs import Runs
from cellfeed.bytes import LastingIdentity, replaced
from cellfeed.bytes._tables import CachedTables, Tables, pack, unpack
from cellfeed.rows import CategoricalColumn, NumericColumn, ObsColumn
from cellfeed.sources._source import as_names
from cellfeed.sources.anndata._file import (
    AnnDataFile,
    StructureError,
    check_sizes,
    damage_named,
    flag,
    index_of,
    is_group,
    table_length,
    text,
    texts,
)

# Gene names: tens of thousands in each file, but usually shared by all files of an atlas.

_FEWEST = 10_000  # names of zarr that are cached between openings; fewer are read in 4 ms
_SAME = WeakValueDictionary[str, "NDArray[np.object_]"]()  # names of the files that are open


def read_names(file: AnnDataFile, path: str, *, is_table: bool = False) -> NDArray[np.object_]:
    """Return the names in an array, or in the index of a table; str, shape (n,), read-only.

    Numbers become text, as in anndata, and missing names None.
    Names that files share are in memory once, and in the cache folder once.
    """
    read = cache(partial(_joined, file, path, is_table=is_table))  # at most once

    def digest() -> Tables | None:
        joined = read()
        return None if joined is None else {"digest": np.frombuffer(_digest(joined), np.uint8)}

    def identified() -> Tables | None:
        table = file.stored(path)
        if isinstance(table, h5py.HLObject):  # of a file with a record
            return digest()
        tables = file.table_cache(f"{path}/{index_of(table)}" if is_table else path)
        n_names = table_length(file, path)
        if n_names < _FEWEST:
            return None
        return tables.get("digest of names", n_names, digest, fewest=_FEWEST)

    found = file.recorded(f"names of {path}", identified)
    if found is None:
        return row_names(file, path) if is_table else _names(file, path)
    known = found["digest"].tobytes()
    if (shared := _SAME.get(known.hex())) is not None:
        return shared

    def names() -> Tables:
        joined = read()
        if joined is None or _digest(joined) != known:
            raise replaced(file.location)
        return {"names": np.frombuffer(joined, np.uint8)}

    of_content = LastingIdentity(known.hex(), is_settled=True)
    cached = CachedTables("gene names", known.hex(), lambda: of_content)
    text = cached.get("names", 0, names, fewest=0)["names"].tobytes().decode()
    own = np.array(text.split("\0"), dtype=object)
    own.flags.writeable = False
    return _SAME.setdefault(known.hex(), own)


def _digest(joined: bytes) -> bytes:
    return blake2b(joined, digest_size=16).digest()


def _joined(file: AnnDataFile, path: str, *, is_table: bool) -> bytes | None:
    """Return names in UTF-8, joined by zero bytes; None if one is missing or has such a byte."""
    if is_table:
        table = file.stored(path)
        if not is_group(table):
            return None
        path = f"{path}/{index_of(table)}"
    check_sizes(file, path)
    file.prefetch([path])
    stored = file.stored(path)
    kind = h5py.check_string_dtype(stored.dtype) if isinstance(stored, h5py.Dataset) else None
    if kind is not None and (kind.length is not None or kind.encoding == "utf-8"):
        encoded = np.ravel(stored[()]).tolist()  # without making text of each
    else:
        names = _names(file, path).tolist()
        if None in names:
            return None
        encoded = [name.encode() for name in names]
    joined: bytes = b"\0".join(encoded)
    joined.decode()  # which raises where it is no text
    return joined if joined.count(b"\0") == len(encoded) - 1 else None


def row_names(file: AnnDataFile, table: str) -> NDArray[np.object_]:
    """Return the names of the rows of a table such as ``obs``, None for missing names."""
    stored = file.stored(table)
    if not is_group(stored):
        return as_names(file.read_oldest_frame(table).index)
    return _names(file, f"{table}/{index_of(stored)}")


def _names(file: AnnDataFile, path: str) -> NDArray[np.object_]:
    """Return names, as text as in anndata."""
    check_sizes(file, path)
    file.prefetch([path])
    values = _values(file, path)
    if isinstance(values, np.ndarray) and all(isinstance(each, str) for each in values):
        return values
    return as_names(pd.Index(values, dtype=object))


_LARGEST_NUMBER = 8  # bytes; torch has none above


def obs_names(file: AnnDataFile, table: str = "obs") -> tuple[str, ...]:
    """Return the names of the columns of a table such as ``obs``."""
    stored = file.stored(table)
    if not is_group(stored):
        return tuple(str(name) for name in file.read_oldest_frame(table).columns)
    if "column-order" not in stored.attrs:
        raise StructureError(f"{stored.name} lacks an attribute `column-order`")
    return texts(stored, "column-order")


def read_obs(file: AnnDataFile, columns: Sequence[str], table: str = "obs") -> pd.DataFrame:
    """Return the given columns, which must exist, of a table such as ``obs``, in that order."""
    file.prefetch([f"{table}/{column}" for column in columns if is_group(file.stored(table))])
    return Table(file, table).read(columns)


def plain_obs(file: AnnDataFile, columns: Sequence[str]) -> dict[str, ObsColumn]:
    """Return columns of current HDF5 files that are numbers or categories of text.

    What is unusual about others, anndata and pandas know, or refuse.
    """

    @cache
    def n_rows() -> int | None:  # None if all columns are unusual
        obs = file.stored("obs")
        if not isinstance(obs, h5py.Group):
            return None
        file.prefetch([f"obs/{column}" for column in columns])
        return table_length(file, "obs")

    def read(column: str) -> Tables | None:
        if n_rows() is None:
            return None
        check_sizes(file, f"obs/{column}", n_rows())
        found = _plain_column(file, f"obs/{column}")
        if isinstance(found, CategoricalColumn):
            return {"codes": found.codes, **pack(found.categories.tolist())}
        return None if found is None else {"values": found.values}

    found = {name: file.recorded(f"obs/{name}", partial(read, name)) for name in columns}
    return {name: _column_of(tables) for name, tables in found.items() if tables is not None}


def _column_of(tables: Tables) -> ObsColumn:
    if "values" in tables:
        return NumericColumn(tables["values"])
    return CategoricalColumn(tables["codes"], np.array(unpack(tables), object))


def _plain_column(file: AnnDataFile, name: str) -> ObsColumn | None:
    stored = file.stored(name)
    encoding = text(stored, "encoding-type")
    if encoding == "array" and isinstance(stored, h5py.Dataset):
        is_number = stored.dtype.kind in "iuf" and stored.dtype.itemsize <= _LARGEST_NUMBER
        is_plain = is_number and stored.dtype.isnative and stored.ndim == 1
        return NumericColumn(stored[()]) if is_plain else None
    if encoding != "categorical" or not isinstance(stored, h5py.Group):
        return None
    members = codes, categories = [
        file.stored(f"{name}/{each}") for each in ("codes", "categories")
    ]
    are_plain = all(isinstance(each, h5py.Dataset) and each.ndim == 1 for each in members)
    if not are_plain or text(categories, "encoding-type") != "string-array":
        return None
    kind = h5py.check_string_dtype(categories.dtype)
    if kind is None or kind.length is not None or codes.dtype.kind != "i":
        return None
    names = np.array(categories.asstr()[()], object)
    values = codes[()]
    fit = not values.size or -1 <= values.min() <= values.max() < names.size
    return CategoricalColumn(values, names) if fit and len(set(names)) == names.size else None


def read_var(file: AnnDataFile, name: str) -> pd.DataFrame:
    """Return a table of genes, indexed by their names."""
    check_sizes(file, name)
    return Table(file, name).read(obs_names(file, name), are_named=True)


# Tables, read by columns and rows, with little more than the rows of a part.

# Rows that are read in vain cost less than another call of h5py.
_LARGEST_GAP = 1024
_LARGEST_TEXT_GAP = 128


class Table:
    """``obs`` of a file, or another table.

    Parameters
    ----------
    file
        An AnnData file or store.
    path
        Path of the table.
    """

    def __init__(self, file: AnnDataFile, path: str = "obs") -> None:
        self._file, self._path = file, path
        self._categories: dict[str, pd.CategoricalDtype] = {}
        self._checked = set[str]()
        self._old: pd.DataFrame | None = None

    def read(
        self,
        columns: Sequence[str],
        rows: NDArray[np.int64] | None = None,
        *,
        are_named: bool = False,
    ) -> pd.DataFrame:
        """Return columns of ascending rows, or of all.

        Parameters
        ----------
        columns, rows
            Names of columns, and rows.
        are_named
            Whether the result is indexed by the names of its rows, which are read, too.
        """
        table = self._file.stored(self._path)
        if not is_group(table):
            if self._old is None:
                self._old = self._file.read_oldest_frame(self._path)
            found = self._old if rows is None else self._old.iloc[rows]
            return found[list(columns)]
        index = index_of(table)
        with damage_named(self._file.location, self._path, _runs_with_gaps(rows)):
            values = {name: self._column(name, rows) for name in columns}
            labels: Any = range(table_length(self._file, self._path) if rows is None else rows.size)
            if are_named:
                names = np.asarray(self._column(index, rows, _LARGEST_TEXT_GAP), dtype=object)
                name = None if index == "_index" else index
                labels = pd.Index(names, dtype=object, name=name)
        return pd.DataFrame(values, index=labels)

    def _column(
        self, name: str, rows: NDArray[np.int64] | None, largest_gap: int = _LARGEST_GAP
    ) -> Any:
        path = f"{self._path}/{name}"
        if name not in self._checked:
            check_sizes(self._file, path, table_length(self._file, self._path))
            self._checked.add(name)
        element = self._file.stored(path)
        if is_group(element):
            codes, categories = f"{path}/codes", f"{path}/categories"
            is_categorical = text(element, "encoding-type") == "categorical"
        else:  # as anndata 0.7 wrote them
            codes, categories = path, f"{self._path}/__categories/{name}"
            is_categorical = "categories" in element.attrs
        if not is_categorical:
            return _values(self._file, path, rows, largest_gap)
        if name not in self._categories:
            check_sizes(self._file, categories)
            ordered = flag(element, "ordered") or flag(self._file.stored(categories), "ordered")
            dtype = pd.CategoricalDtype(_values(self._file, categories), ordered=ordered)
            self._categories[name] = dtype
        found = _values(self._file, codes, rows, largest_gap)
        return pd.Categorical.from_codes(found, dtype=self._categories[name])


def _values(
    file: AnnDataFile,
    path: str,
    rows: NDArray[np.int64] | None = None,
    largest_gap: int = _LARGEST_GAP,
) -> Any:
    """Return values of an array, which may have a mask, as NumPy or pandas represents them."""
    element = file.stored(path)
    encoding = text(element, "encoding-type")
    if not is_group(element) and encoding in ("", "array", "string-array"):
        return read_rows(element, rows, largest_gap)
    if not is_group(element) or not encoding.startswith("nullable-"):
        raise StructureError(f"{element.name} has the unknown encoding {encoding!r}")
    parts = (file.stored(f"{path}/{part}") for part in ("values", "mask"))
    values, mask = (read_rows(part, rows, largest_gap) for part in parts)
    if encoding == "nullable-integer":
        return pd.arrays.IntegerArray(values, mask)
    if encoding == "nullable-boolean":
        return pd.arrays.BooleanArray(values, mask)
    values[mask] = None
    return pd.array(values, dtype="string")


def read_rows(
    stored: Any, rows: NDArray[np.int64] | None, largest_gap: int = _LARGEST_TEXT_GAP
) -> NDArray[Any]:
    """Return ``stored[rows]`` for an HDF5 or zarr array of numbers or text.

    Parameters
    ----------
    stored
        The array.
    rows
        Ascending rows; all if None.
    largest_gap
        See `_runs_with_gaps`.
    """
    is_text = stored.dtype.kind not in "biufc"
    if is_text and isinstance(stored, h5py.Dataset):
        stored = stored.asstr()
    dtype = np.dtype(object) if is_text else stored.dtype.newbyteorder("=")
    if rows is None:
        return np.asarray(stored[...], dtype=dtype)
    out = np.empty(rows.size, dtype=dtype)
    runs = _runs_with_gaps(rows, largest_gap)
    bounds = np.searchsorted(rows, runs)
    for (start, stop), (first, last) in zip(runs.tolist(), bounds.tolist(), strict=True):
        out[first:last] = np.asarray(stored[start:stop], dtype=dtype)[rows[first:last] - start]
    return out


def _runs_with_gaps(rows: NDArray[np.int64] | None, largest: int = _LARGEST_GAP) -> Runs:
    """Return runs that contain ascending ``rows``, and other rows only if that saves a call.

    Examples
    --------
    >>> _runs_with_gaps(np.array([3, 5, 9, 5000])).tolist()
    [[3, 10], [5000, 5001]]
    """
    if rows is None or not rows.size:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(rows) > largest)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, rows.size - 1)
    return np.stack([rows[firsts], rows[lasts] + 1], axis=1)
