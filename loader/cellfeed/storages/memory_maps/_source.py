"""CSR matrices in uncompressed files, as BioNeMo SCDL and SciPy write them."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import Location, map_or_read, refuse_pipe, require_file
from cellfeed.decode import ChunkedArray, Pieces, pieced_array
from cellfeed.extending import FormatError, ParameterError, PathError, pd
from cellfeed.rows import CsrChunks
from cellfeed.sources import (
    FlatCsr,
    Source,
    Storage,
    failures_named,
    files_in,
    gene_names,
)
from cellfeed.sources.arrow import import_arrow, to_frame

# The arrays of a folder of memory maps: their files, dtypes and sizes.

_FILES = np.arange(3)  # of row pointers, column indices and values
_NPY = ("data", "indices", "indptr", "shape")
_SCDL = {"DATA": "data.npy", "COLPTR": "col_ptr.npy", "ROWPTR": "row_ptr.npy"}
_SCDL_DTYPES = {1: "u1", 2: "u2", 3: "u4", 4: "u8", 5: "f2", 6: "f4", 7: "f8"}
_MAGIC, _COUNTS_FROM = b"SCDL", 12


@dataclass(frozen=True, slots=True)
class FlatArray:
    """A one-dimensional array in a file.

    Parameters
    ----------
    path
        The file.
    dtype
        Dtype of its elements, in the file's byte order.
    offset
        First byte of the first element.
    size
        Number of elements.
    """

    path: Path
    dtype: np.dtype[Any]
    offset: int
    size: int

    def mapped(self) -> NDArray[Any]:
        """Return the array, memory-mapped if that is safe."""
        if not self.size:
            return np.empty(0, self.dtype)
        n_bytes = self.size * self.dtype.itemsize
        return map_or_read(self.path)[self.offset : self.offset + n_bytes].view(self.dtype)


@dataclass(frozen=True, slots=True)
class FlatArrays:
    """The three arrays of a CSR matrix.

    Parameters
    ----------
    data, indices, indptr
        Values, column indices and row pointer.
    n_columns
        Number of columns; None if the files do not state it.
    """

    data: FlatArray
    indices: FlatArray
    indptr: FlatArray
    n_columns: int | None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.indptr.size - 1


def is_npy_folder(path: Path) -> bool:
    """Return whether a folder is an unzipped archive of `scipy.sparse.save_npz`."""
    return all((path / f"{name}.npy").is_file() for name in _NPY)


def is_scdl(path: Path) -> bool:
    """Return whether a folder is a BioNeMo SCDL dataset."""
    return all((path / name).is_file() for name in _SCDL.values())


def arrays_of(folder: Location) -> FlatArrays:
    """Return the arrays of a folder.

    Raises
    ------
    PathError
        There is no such folder, or a file is missing.
    FormatError
        The arrays do not form one CSR matrix.
    """
    path = Path(folder)
    if not path.is_dir():
        raise PathError(f"{folder}: there is no such folder; check the path")
    found = _of_scdl(folder, path) if is_scdl(path) else _of_npy(folder, path)
    for array in (found.data, found.indices):
        remedy = None if array.dtype.isnative else "write it again on this machine"
        if array.dtype.kind == "f" and array.dtype.itemsize < np.dtype(np.float32).itemsize:
            remedy = "write it as float32"
        if remedy is not None:
            raise FormatError(f"{array.path}: has {array.dtype}, which is not read; {remedy}")
    if found.n_rows < 0 or found.data.size != found.indices.size:
        raise _not_one_matrix(folder)
    pointer = found.indptr.mapped()
    if pointer[0] != 0 or int(pointer[-1]) != found.data.size:
        raise _not_one_matrix(folder)
    return found


def _of_npy(folder: Location, path: Path) -> FlatArrays:
    data, indices, indptr, shape = (_npy(path / f"{name}.npy") for name in _NPY)
    kinds = (data, "biuf"), (indices, "iu"), (indptr, "iu"), (shape, "iu")
    sizes = shape.mapped().tolist()
    form = path / "format.npy"
    with _unreadable(form):
        is_csr = not form.exists() or np.load(form) == b"csr"
    fits = len(sizes) == 2 and indptr.size == sizes[0] + 1  # noqa: PLR2004 - rows, columns
    if not (is_csr and fits and all(each.dtype.kind in some for each, some in kinds)):
        raise _not_one_matrix(folder)
    return FlatArrays(data, indices, indptr, int(sizes[1]))


def _npy(path: Path) -> FlatArray:
    if not path.is_file():
        msg = f"{path}: is missing; unzip a file that `scipy.sparse.save_npz` wrote with"
        raise PathError(f"{msg} compressed=False")
    # NumPy parses its header as Python, and raises whatever that raises.
    with failures_named(f"{path}: is not a complete .npy file", "write it again"):
        mapped = np.load(path, mmap_mode="r")
    if not isinstance(mapped, np.memmap) or mapped.ndim != 1:
        raise FormatError(f"{path}: is not a one-dimensional array; write it again")
    return FlatArray(path, mapped.dtype, int(mapped.offset), mapped.size)


def _of_scdl(folder: Location, path: Path) -> FlatArrays:
    dtypes = _scdl_dtypes(path / "header.sch")

    def array(name: str) -> FlatArray:
        file = path / _SCDL[name]
        dtype, n_bytes = np.dtype(dtypes[name]), file.stat().st_size
        if n_bytes % dtype.itemsize:
            msg = f"{file}: its {n_bytes} bytes are not a multiple of {dtype}"
            raise FormatError(f"{msg}; copy or write the folder {folder.name} again")
        return FlatArray(file, dtype, 0, n_bytes // dtype.itemsize)

    return FlatArrays(array("DATA"), array("COLPTR"), array("ROWPTR"), None)


def _scdl_dtypes(header: Path) -> dict[str, str]:
    """Return the dtypes in a header; numbers are big-endian, text is preceded by its length."""

    def take(form: str) -> Any:
        fields = struct.Struct(f">{form}")
        return fields.unpack(file.read(fields.size))[0]

    require_file(header)
    file, found = BytesIO(header.read_bytes()), dict[str, str]()
    what = f"{header}: is not a known header of BioNeMo SCDL"
    remedy = "write the folder again with another version of it"
    with failures_named(what, remedy, (struct.error, KeyError, ValueError)):
        if file.read(_COUNTS_FROM)[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it begins with other bytes")
        for _ in range(take("I")):
            name = take(f"{take('I')}s").decode()
            take("Q")  # the length of the array, which also follows from the file size
            found[name] = _SCDL_DTYPES[take("I")]
            if take("B"):
                take(f"{4 * take('I')}s")
        return {name: found[name] for name in _SCDL}


def _not_one_matrix(folder: Location) -> FormatError:
    msg = f"{folder}: its arrays do not form one CSR matrix"
    return FormatError(f"{msg}; write them again, in the layout of `scipy.sparse.csr_array`")


# The tables of genes and of cells in a folder of BioNeMo SCDL.

# Columns that may contain names of genes, first the one into which SCDL writes the index.
_NAMES = ("var_feature_id", "feature_id", "gene_id", "ensembl_id", "feature_name", "gene_name")


def gene_tables(folder: Location, n_rows: int) -> list[tuple[range, pd.DataFrame]]:
    """Return the tables of genes of a folder, each with its cells; equal neighbours are one.

    Raises
    ------
    FormatError
        There are no tables, or they do not cover the cells of the folder.
    """
    if not Path(folder, "var_features").is_dir():
        msg = f"{folder}: has no `var_features`, so the number of genes is unknown"
        raise FormatError(f"{msg}; save it with `SingleCellMemMapDataset.save`")
    bounds, files = _saved(folder, "var_features", n_rows)
    arrow = import_arrow(folder, "scdl")
    tables = list[tuple[range, pd.DataFrame]]()
    for k, file in enumerate(files):
        first, var = bounds[k], _read(arrow, file, None).to_pandas()
        if tables and tables[-1][1].equals(var):
            first = tables.pop()[0].start
        tables.append((range(first, bounds[k + 1]), var))
    return tables


def obs_tables(folder: Location, n_rows: int) -> tuple[Any, list[Path]]:
    """Return pyarrow, and the tables of cells, after comparing their row counts with the index."""
    arrow = import_arrow(folder, "scdl")
    if not Path(folder, "obs_features").is_dir():
        return arrow, []
    bounds, files = _saved(folder, "obs_features", n_rows)
    for file, first, stop in zip(files, bounds, bounds[1:], strict=False):
        with _unreadable(file):
            n_rows = arrow.parquet.read_metadata(file).num_rows
        if n_rows != stop - first:
            msg = f"{file}: has {n_rows} rows, but its index states {stop - first}"
            raise FormatError(f"{msg}; write the folder {folder.name} again")
    return arrow, files


def _saved(folder: Location, name: str, n_rows: int) -> tuple[list[int], list[Path]]:
    """Return the row bounds and the files of the tables of the last save; may be none.

    BioNeMo numbers the files from 0, padded to the number of digits of their count, and does not
    remove the files of an earlier save.

    Raises
    ------
    FormatError
        A file is missing, or the files do not cover ``n_rows`` cells.
    """
    where = Path(folder, name)
    index = where / "cumulative_sum_index.npy"
    with _unreadable(index):
        bounds = np.maximum(np.load(index).astype(np.int64), 0).ravel().tolist()
    n_tables = len(bounds) - 1
    if not n_tables and name == "obs_features":  # the cells have no labels
        return bounds, []
    files = [where / f"dataframe_{k:0{len(str(n_tables))}d}.parquet" for k in range(n_tables)]
    lacking = next((file for file in files if not file.is_file()), None)
    if lacking is not None or not files:
        msg = f"{lacking or where}: is missing, one of {n_tables} tables in `{index.name}`"
        raise FormatError(f"{msg}; write the folder {folder.name} again")
    if bounds[-1] != n_rows:
        msg = f"{index}: covers {bounds[-1]} cells, not {n_rows}"
        raise FormatError(f"{msg}; write the folder {folder.name} again")
    return bounds, files


def _unreadable(file: Path) -> AbstractContextManager[None]:
    """Convert errors of a file that is missing or damaged; refuse a pipe."""
    refuse_pipe(file)
    return failures_named(f"{file}: cannot be read", "copy it again")


def _read(arrow: Any, file: Path, columns: Sequence[str] | None) -> Any:
    with _unreadable(file):
        parquet = arrow.parquet.ParquetFile(file)
        if columns is None:
            return parquet.read()
        wanted = [name for name in columns if name in parquet.schema_arrow.names]
        if wanted:
            return parquet.read(wanted)
        return arrow.table({columns[0]: arrow.nulls(parquet.metadata.num_rows)})


# The matrix of a folder of memory maps.


class MappedCsr(FlatCsr):
    """Rows of a CSR matrix, which compiled threads read from its files.

    Parameters
    ----------
    folder
        Folder of the files.
    arrays
        Its arrays.
    rows
        The rows.
    names
        Names of the columns, str, shape (n_columns,); None if they have none.
    n_columns
        Number of columns.
    """

    def __init__(
        self,
        folder: Location,
        arrays: FlatArrays,
        rows: range,
        names: NDArray[np.object_] | None,
        n_columns: int,
    ) -> None:
        used = [each.path.name for each in (arrays.indices, arrays.data, arrays.indptr)]
        files = files_in(Path(folder), used)
        super().__init__(files, (len(rows), n_columns), arrays.data.dtype)
        self._location, self._arrays, self._rows = folder, arrays, rows
        self.column_names = names

    def stored_bytes(self) -> int:
        """Return the size of its files in bytes, or the share of its rows in them."""
        n_bytes = int(self._files.sizes(_FILES).sum())
        return round(n_bytes * self.shape[0] / max(1, self._arrays.n_rows))

    def chunked(self) -> CsrChunks:
        """Return the location of the rows."""
        self._files.check_files(_FILES)  # reading a part that is gone would kill the process
        return super().chunked()

    def _find(self) -> CsrChunks:
        stored = self._arrays.indptr.mapped()[self._rows.start : self._rows.stop + 1]
        is_mapped = stored.dtype in (np.int64, np.uint64)
        pointer = stored.view(np.int64) if is_mapped else stored.astype(np.int64)
        if np.any(pointer[1:] < pointer[:-1]) or not 0 <= pointer[0] <= pointer[-1]:
            msg = f"{self._location}: `{self._arrays.indptr.path.name}` does not ascend"
            raise FormatError(f"{msg}; it is damaged, copy or write it again")
        arrays = list[ChunkedArray]()
        for file, array in enumerate((self._arrays.indices, self._arrays.data)):
            files, offsets, sizes = (np.array([n]) for n in (file, array.offset, array.size))
            pieces = Pieces(files, offsets, sizes, array.dtype.itemsize)
            arrays.append(pieced_array(array.path.name, pieces, array.dtype, self._files))
        return CsrChunks(pointer, arrays[0], arrays[1], self.shape[1])


# `MemoryMapSource`: folders of memory-mapped CSR arrays of BioNeMo SCDL or SciPy.


class MemoryMapSource(Source):
    """A CSR matrix in uncompressed files, which compiled threads read.

    The folder is a BioNeMo SCDL dataset (``data.npy``, ``col_ptr.npy``, ``row_ptr.npy`` and
    tables of cells and genes; neighbours are not read), or an unzipped archive that
    `scipy.sparse.save_npz` wrote with ``compressed=False`` (``data.npy``, ``indices.npy``,
    ``indptr.npy`` and ``shape.npy``).

    Parameters
    ----------
    folder
        Folder of the files.
    obs
        A data frame with a row for each cell, which replaces the table of the folder and stays in
        memory.
    var
        A data frame with a row for each gene, indexed by gene name or with a column of names, which
        replaces the table of the folder.
    part
        Number of the part of an SCDL folder to read, if its cells have several tables of genes.

    Raises
    ------
    PathError
        A file is missing.
    FormatError
        The arrays do not form one CSR matrix; or the cells of an SCDL folder have several tables of
        genes, which `open_collection` opens as several sources.
    ParameterError
        The number of rows of a table is not the number of cells or genes, or ``var`` has no names.

    Examples
    --------
    >>> import tempfile, zipfile
    >>> import scipy.sparse as sp
    >>> from cellfeed import MemoryMapSource, open_collection
    >>> folder = tempfile.mkdtemp()
    >>> sp.save_npz(f"{folder}/X.npz", sp.csr_array(np.eye(3)), compressed=False)
    >>> zipfile.ZipFile(f"{folder}/X.npz").extractall(folder)
    >>> obs = pd.DataFrame({"plate": ["a", "a", "b"]})
    >>> collection = open_collection(MemoryMapSource(folder, obs=obs), obs=["plate"])
    >>> collection[[2, 0]].X.toarray()
    array([[0., 0., 1.],
           [1., 0., 0.]])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        obs: pd.DataFrame | None = None,
        var: pd.DataFrame | None = None,
        part: int | None = None,
    ) -> None:
        self.location = Location.of(folder)
        arrays = arrays_of(self.location)
        self._n_stored, n_columns = arrays.n_rows, arrays.n_columns
        self._rows = range(arrays.n_rows)
        names: NDArray[np.object_] | None = None
        given = var is not None
        if var is None and is_scdl(Path(self.location)):
            tables = gene_tables(self.location, arrays.n_rows)
            if part is None and len(tables) > 1:
                msg = (
                    f"{self.location}: has cells of {len(tables)} tables of genes; give the folder"
                )
                raise FormatError(f"{msg} to `open_collection`, or one `part` of it")
            if part is not None and not 0 <= part < len(tables):
                msg = f"`0 <= part < {len(tables)}` must hold, but got part={part}"
                raise ParameterError(f"{self.location}: {msg}")
            self._rows, var = tables[part or 0]
            names, n_columns = gene_names(var, _NAMES, may_be_index=False), len(var)
        elif part is not None:
            msg = f"{self.location}: `part` applies only to SCDL folders without a given `var`"
            raise ParameterError(f"{msg}; leave it out")
        elif var is not None:
            names = gene_names(var, _NAMES, may_be_index=True)
            n_columns = len(var) if n_columns is None else n_columns
        for table, name, n in ((obs, "obs", len(self._rows)), (var, "var", n_columns)):
            if table is not None and len(table) != n:
                msg = f"`{name}` must have {n} rows, but has {len(table)}"
                raise ParameterError(f"{self.location}: {msg}")
        if given and names is None:
            msg = f"{self.location}: `var` has no names of genes"
            raise ParameterError(f"{msg}; give a data frame that is indexed by them")
        self._obs, self._var = obs, var
        self._selection = "" if len(self._rows) == arrays.n_rows else repr(self._rows)
        self.elements = {"X": MappedCsr(self.location, arrays, self._rows, names, n_columns or 0)}

    def selection(self) -> str:
        """Return the rows of the part of an SCDL folder."""
        return self._selection

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        if self._obs is not None:
            return [*map(str, self._obs)]
        arrow, files = obs_tables(self.location, self._n_stored)
        found = dict[str, None]()
        for file in files:
            with _unreadable(file):
                found |= dict.fromkeys(arrow.parquet.read_schema(file).names)
        return [*found]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns; values are missing for cells whose table lacks a column."""
        if self._obs is not None:
            return self._obs[[*columns]].reset_index(drop=True)
        arrow, files = obs_tables(self.location, self._n_stored)
        parts = [_read(arrow, file, columns) for file in files]
        table = arrow.concat_tables(parts, promote_options="permissive").select(list(columns))
        return to_frame(table.slice(self._rows.start, len(self._rows)))

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed as the given obs, or else by row number."""
        table = super().read_obs_rows(columns, rows)
        if self._obs is not None:
            table.index = self._obs.index[rows].astype(str).astype(object)
        return table

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        if self._var is None:
            return super().read_var()
        names = self.elements["X"].var_names()
        return self._var.set_index(pd.Index(names, dtype=object))


# Folders of memory maps.


def _open(folder: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has X
    """Open a folder as one source, or as one source for each table of genes of SCDL."""
    if not is_scdl(Path(folder)):
        return [MemoryMapSource(folder)]
    n_parts = len(gene_tables(folder, arrays_of(folder).n_rows))
    return [MemoryMapSource(folder, part=part) for part in range(n_parts)]


SCDL = Storage(
    name="BioNeMo SCDL",
    open=_open,
    suffixes=(".scdl",),
    recognizes=is_scdl,
)
MEMORY_MAPS = Storage(
    name="memory-mapped CSR",
    open=_open,
    recognizes=is_npy_folder,
)
