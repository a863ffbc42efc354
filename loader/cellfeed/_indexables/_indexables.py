"""Cells in storages of other kinds, as indexables that a `CellDataset` takes."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import (
    ColumnError,
    FormatError,
    ParameterError,
    PathError,
    require_positive,
)
from cellfeed._indexables._multi_indexable import MultiIndexable
from cellfeed._runs import merge_consecutive

__all__ = ["HuggingFaceCells", "MemoryMappedCells"]

# A slice of a HuggingFace data set costs as much as so many single rows.
_ROWS_PER_SLICE = 8

Rows = slice | Sequence[int] | NDArray[np.integer[Any]]


class MemoryMappedCells:
    """A CSR matrix in uncompressed files that are mapped into memory.

    The files are those of `scipy.sparse.save_npz` with ``compressed=False``, unzipped into a
    folder: ``data.npy``, ``indices.npy``, ``indptr.npy`` and ``shape.npy``. ``cells[rows]`` reads
    only those rows, which the system is asked to read ahead all at once. Unlike NumPy's memory
    maps, of which a copy of all values is pickled, it is pickled as its folder, so that worker
    processes map the files themselves.

    Parameters
    ----------
    folder
        Where the files are.

    Raises
    ------
    PathError
        A file is missing.
    FormatError
        The files do not fit each other, which also may show when rows are read.

    Examples
    --------
    >>> import tempfile, zipfile
    >>> folder = tempfile.mkdtemp()
    >>> sp.save_npz(f"{folder}/X.npz", sp.csr_array(np.eye(3)), compressed=False)
    >>> zipfile.ZipFile(f"{folder}/X.npz").extractall(folder)
    >>> MemoryMappedCells(folder)[[2, 0]].toarray()
    array([[0., 0., 1.],
           [1., 0., 0.]])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._data = self._open("data")
        self._indices = self._open("indices")
        self._indptr = self._open("indptr")
        shape = self._open("shape")
        is_csr = not (self._folder / "format.npy").exists() or self._open("format") == b"csr"
        if not (is_csr and shape.shape == (2,) and self._indptr.shape == (shape[0] + 1,)):
            self._fail()
        if not self._data.shape == self._indices.shape == (self._indptr[-1],):
            self._fail()
        self.shape: tuple[int, int] = (int(shape[0]), int(shape[1]))

    def _open(self, name: str) -> NDArray[Any]:
        path = self._folder / f"{name}.npy"
        try:
            mapped: NDArray[Any] = np.load(path, mmap_mode="r")
        except FileNotFoundError as error:
            msg = f"{path} is missing; unzip what `scipy.sparse.save_npz` wrote uncompressed"
            raise PathError(msg) from error
        except (ValueError, EOFError) as error:
            msg = f"{path} is not a whole .npy file; write it again ({error})"
            raise FormatError(msg) from error
        return mapped

    def _fail(self) -> NoReturn:
        msg = (
            f"{self._folder}: data.npy, indices.npy, indptr.npy and shape.npy are not of one CSR "
            "matrix; write them again"
        )
        raise FormatError(msg)

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryMappedCells, (self._folder,)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the cells."""
        return tuple(self._folder / f"{name}.npy" for name in ("data", "indices", "indptr"))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Rows) -> sp.csr_array:
        runs = merge_consecutive(_numbers(rows, len(self)))
        lengths = [np.diff(self._indptr[start : stop + 1]) for start, stop in runs.tolist()]
        stored = [slice(start, stop) for start, stop in self._indptr[runs].tolist()]
        for array in (self._data, self._indices):
            _read_ahead(array, stored)
        data, indices = (
            np.concatenate([array[each] for each in stored] or [array[:0]])
            for array in (self._data, self._indices)
        )
        if not _are_below(indices, self.shape[1]) or any(each.min() < 0 for each in lengths):
            self._fail()
        return _csr(data, indices, _offsets(lengths), self.shape[1])


class HuggingFaceCells:
    """Cells of a HuggingFace data set with a row for each cell and two lists in it.

    One list holds the numbers of the genes that were counted, and one as many values.
    ``cells[rows]`` is a `MultiIndexable` of ``X``, CSR of shape (n_rows, n_vars), and of the obs
    columns asked for.

    Parameters
    ----------
    dataset
        A `datasets.Dataset`, such as `datasets.load_from_disk` gives.
    n_vars
        Number of genes, if genes are numbered from 0 as columns of ``X`` are.
    gene_ids
        Otherwise the number of the gene in each column of ``X``, distinct, shape (n_vars,), such
        as the token ids of Tahoe-100M. What has none of these numbers is left out, such as the
        marker that each cell of Tahoe-100M begins with.
    genes, values
        The columns that hold the lists.
    obs
        Columns to deliver besides, such as labels, as they are stored.

    Raises
    ------
    ColumnError
        The data set has no such column.
    ParameterError
        Not one of ``n_vars`` and ``gene_ids`` is given, ids are not distinct, or an obs column is
        named ``X``.
    FormatError
        When rows are read: a cell has no lists of numbers, they differ in length, or a gene's
        number is not below ``n_vars``.

    Examples
    --------
    >>> import datasets
    >>> columns = {"genes": [[1, 5, 9], [1, 9]], "expressions": [[-2.0, 3.0, 4.0], [-2.0, 7.0]]}
    >>> cells = HuggingFaceCells(datasets.Dataset.from_dict(columns), gene_ids=[9, 7, 5])
    >>> cells[[1, 0]]["X"].toarray()
    array([[7., 0., 0.],
           [4., 0., 3.]])
    """

    def __init__(
        self,
        dataset: Any,
        *,
        n_vars: int | None = None,
        gene_ids: ArrayLike | None = None,
        genes: str = "genes",
        values: str = "expressions",
        obs: Sequence[str] = (),
    ) -> None:
        if (n_vars is None) == (gene_ids is None):
            msg = "give either `n_vars`, the number of genes, or `gene_ids`, their numbers"
            raise ParameterError(msg)
        if "X" in obs:
            msg = "an obs column must not be named 'X', as the matrix is; rename it"
            raise ParameterError(msg)
        self._ids = None if gene_ids is None else _GeneIds(np.asarray(gene_ids))
        self.n_vars = require_positive("n_vars", n_vars if self._ids is None else len(self._ids))
        self._genes, self._values, self._obs = genes, values, tuple(obs)
        columns = list(dict.fromkeys([genes, values, *obs]))
        for column in columns:
            if column not in dataset.column_names:
                there = ", ".join(dataset.column_names)
                msg = f"the data set has no column {column!r}; its columns are: {there}"
                raise ColumnError(msg)
        self._dataset = dataset.select_columns(columns).with_format("arrow")

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the cells."""
        return tuple(Path(each["filename"]) for each in self._dataset.cache_files)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: Rows) -> MultiIndexable:
        table = self._table(_numbers(rows, len(self)))
        lengths, indices = self._lists(table, self._genes, kinds="iu")
        lengths_of_values, data = self._lists(table, self._values, kinds="iuf")
        if not np.array_equal(lengths, lengths_of_values):
            msg = (
                f"columns {self._genes!r} and {self._values!r} of the data set: the lists of a "
                "cell differ in length; name columns that belong together"
            )
            raise FormatError(msg)
        indptr = _offsets([lengths])
        if self._ids is not None:
            indices, is_gene = self._ids.columns_of(indices)
            data, indices = data[is_gene], indices[is_gene]
            indptr = np.append(0, np.cumsum(is_gene))[indptr]
        if not _are_below(indices, self.n_vars):
            msg = (
                f"column {self._genes!r} of the data set: numbers from {indices.min()} to "
                f"{indices.max()} do not fit n_vars={self.n_vars}; give `gene_ids`"
            )
            raise FormatError(msg)
        obs = {name: table.column(name).to_numpy() for name in self._obs}
        return MultiIndexable({"X": _csr(data, indices, indptr, self.n_vars), **obs})

    def _table(self, rows: NDArray[np.int64]) -> Any:
        import pyarrow as pa  # noqa: PLC0415 - comes with `datasets`, which few have

        runs = merge_consecutive(rows)
        if len(runs) * _ROWS_PER_SLICE >= rows.size:
            return self._dataset[rows]
        return pa.concat_tables([self._dataset[start:stop] for start, stop in runs.tolist()])

    def _lists(
        self, table: Any, name: str, *, kinds: str
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the length of each list of a column, and what is in all of them."""
        import pyarrow.compute as pc  # noqa: PLC0415

        column = table.column(name)
        flat = pc.list_flatten(column)
        elements = flat.to_numpy()
        if column.null_count or flat.null_count or elements.dtype.kind not in kinds:
            msg = f"column {name!r} of the data set: not every cell has a list of numbers"
            raise FormatError(msg)
        return pc.list_value_length(column).to_numpy(), elements


def _read_ahead(mapped: NDArray[Any], parts: Sequence[slice]) -> None:
    """Tell the system which parts of a mapped array are read next, so that it reads them at once.

    Page by page, as they are touched, each would be waited for by itself.
    """
    mapping: mmap.mmap | None = getattr(mapped, "_mmap", None)
    if mapping is None or not hasattr(mmap, "MADV_WILLNEED"):
        return
    # The array begins after a header, and the mapping at its address or before it.
    offset = mapped.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    for part in parts:
        if part.start == part.stop:
            continue
        start = offset + part.start * mapped.itemsize
        page = start - start % mmap.PAGESIZE
        length = offset + part.stop * mapped.itemsize - page
        mapping.madvise(mmap.MADV_WILLNEED, page, length)


def _numbers(rows: Rows, n_rows: int) -> NDArray[np.int64]:
    """Return the numbers of the rows that are asked for, shape (n,).

    Raises
    ------
    IndexError
        A row is not there, or what is asked for are no row numbers.
    """
    if isinstance(rows, slice):
        return np.arange(*rows.indices(n_rows))
    numbers = np.asarray(rows)
    if numbers.ndim != 1 or not (numbers.dtype.kind in "iu" or numbers.size == 0):
        msg = f"rows must be a slice, or integers in one dimension, but got {rows!r}"
        raise IndexError(msg)
    if not _are_below(numbers, n_rows):
        msg = f"rows {numbers.min()} to {numbers.max()} are asked for, but there are {n_rows}"
        raise IndexError(msg)
    return numbers.astype(np.int64)


def _are_below(numbers: NDArray[Any], limit: int) -> bool:
    return numbers.size == 0 or bool(0 <= numbers.min() <= numbers.max() < limit)


def _offsets(lengths: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Return where rows of these lengths begin and end, one after the other."""
    return np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)


def _csr(
    data: NDArray[Any], indices: NDArray[Any], indptr: NDArray[np.int64], n_vars: int
) -> sp.csr_array:
    return sp.csr_array((data, indices, indptr), shape=(indptr.size - 1, n_vars))


class _GeneIds:
    """Which column of ``X`` each number of a gene stands for."""

    def __init__(self, ids: NDArray[Any]) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or (np.diff(self._sorted) == 0).any():
            msg = "`gene_ids` must be distinct integers in one dimension"
            raise ParameterError(msg)

    def __len__(self) -> int:
        return self._order.size

    def columns_of(self, ids: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return the column of each id, and whether there is one."""
        places = np.searchsorted(self._sorted, ids).clip(max=self._order.size - 1)
        return self._order[places], self._sorted[places] == ids
