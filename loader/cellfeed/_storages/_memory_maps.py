"""CSR matrices in uncompressed files, as BioNeMo SCDL and SciPy write them."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._decode import FolderFiles, Pieces, can_cast, pieced_array
from cellfeed._errors import FormatError, ParameterError, PathError
from cellfeed._lazy import pd
from cellfeed._mapping import map_or_read
from cellfeed._rows import CsrChunks, CsrRows
from cellfeed._runs import Runs, expand
from cellfeed._storages._base import (
    FileNames,
    FlatCsr,
    Source,
    Storage,
    StorageFacts,
    import_arrow,
    to_frame,
)

# The arrays of a folder of memory maps: their files, dtypes and sizes.

_NPY = ("data", "indices", "indptr", "shape")
_SCDL = {"DATA": "data.npy", "COLPTR": "col_ptr.npy", "ROWPTR": "row_ptr.npy"}
_SCDL_DTYPES = {1: "u1", 2: "u2", 3: "u4", 4: "u8", 5: "f2", 6: "f4", 7: "f8"}
_WITHOUT_HEADER = {"DATA": "f4", "COLPTR": "u4", "ROWPTR": "u8"}
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
        if not array.dtype.isnative:
            msg = (
                f"{array.path}: its numbers are not in the byte order of this machine "
                f"({array.dtype})"
            )
            raise FormatError(f"{msg}; write it again on this one")
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
    is_csr = not (path / "format.npy").exists() or np.load(path / "format.npy") == b"csr"
    fits = len(sizes) == 2 and indptr.size == sizes[0] + 1  # noqa: PLR2004 - rows, columns
    if not (is_csr and fits and all(each.dtype.kind in some for each, some in kinds)):
        raise _not_one_matrix(folder)
    return FlatArrays(data, indices, indptr, int(sizes[1]))


def _npy(path: Path) -> FlatArray:
    try:
        mapped = np.load(path, mmap_mode="r")
    except FileNotFoundError as error:
        msg = (
            f"{path}: is missing; unzip a file that `scipy.sparse.save_npz` wrote with "
            "compressed=False"
        )
        raise PathError(msg) from error
    except (ValueError, EOFError) as error:
        said = str(error).splitlines()[0]
        raise FormatError(
            f"{path}: is not a complete .npy file ({said}); write it again"
        ) from error
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
    """Return the dtypes in a header; without a header, the dtypes of folders that had none."""
    if not header.exists():
        return _WITHOUT_HEADER
    content = header.read_bytes()
    try:
        return _WITHOUT_HEADER | _parsed(content)
    except (struct.error, KeyError, ValueError, UnicodeDecodeError) as error:
        msg = f"{header}: is not a known header of BioNeMo SCDL ({error})"
        raise FormatError(f"{msg}; write the folder again with another version of it") from error


def _parsed(content: bytes) -> dict[str, str]:
    """Return the dtype of each array; numbers are big-endian, text is preceded by its length."""
    if not content.startswith(_MAGIC):
        raise ValueError("it begins with other bytes")
    at = _COUNTS_FROM

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f">{form}", content, at)
        at += struct.calcsize(f">{form}")
        return value

    take_text: Callable[[], str] = lambda: take(f"{take('I')}s").decode()  # noqa: E731
    found = dict[str, str]()
    for _ in range(take("I")):
        name = take_text()
        take("Q")  # the length of the array, which also follows from the file size
        found[name] = _SCDL_DTYPES[take("I")]
        if take("B"):
            take(f"{4 * take('I')}s")
    return found


def _not_one_matrix(folder: Location) -> FormatError:
    msg = f"{folder}: its arrays do not form one CSR matrix"
    return FormatError(f"{msg}; write them again, in the layout of `scipy.sparse.csr_array`")


# The tables of genes and of cells in a folder of BioNeMo SCDL.

# Columns that may contain names of genes, first the one into which SCDL writes the index.
_NAMES = ("var_feature_id", "feature_id", "gene_id", "ensembl_id", "feature_name", "gene_name")


@dataclass(frozen=True, slots=True, eq=False)
class GeneTable:
    """Genes, and the cells that have these genes.

    Parameters
    ----------
    rows
        The first of these cells, and the one after the last.
    var
        One row per gene.
    """

    rows: tuple[int, int]
    var: pd.DataFrame


def gene_tables(folder: Location, n_rows: int) -> list[GeneTable]:
    """Return the tables of genes of a folder, merging adjacent tables that are equal.

    Raises
    ------
    FormatError
        There are no tables, or they do not cover the cells of the folder.
    """
    where = next(
        (Path(folder, n) for n in ("var_features", "features") if Path(folder, n).is_dir()), None
    )
    if where is None:
        msg = f"{folder}: has no `var_features`, so the number of genes is unknown"
        raise FormatError(f"{msg}; save it with `SingleCellMemMapDataset.save`")
    bounds, files = _saved(folder, where.name, n_rows)
    arrow = import_arrow(folder, "scdl")
    tables = list[GeneTable]()
    for k, file in enumerate(files):
        var = _read(arrow, file, None).to_pandas()
        if tables and tables[-1].var.equals(var):
            tables[-1] = GeneTable((tables[-1].rows[0], bounds[k + 1]), var)
        else:
            tables.append(GeneTable((bounds[k], bounds[k + 1]), var))
    return tables


def names_of(var: pd.DataFrame) -> NDArray[np.object_] | None:
    """Return the names of genes; None if no column contains them."""
    column = next((name for name in _NAMES if name in var), None)
    return None if column is None else var[column].astype(str).to_numpy(object)


class ScdlObs:
    """The obs columns of a folder.

    Parameters
    ----------
    folder
        The folder.
    n_rows
        Its number of cells.
    rows
        First row to read, and the one after the last.
    """

    def __init__(self, folder: Location, n_rows: int, rows: tuple[int, int]) -> None:
        self._folder, self._n_rows, self._rows = folder, n_rows, rows

    def names(self) -> list[str]:
        """Return the names of all columns."""
        arrow, files = self._files()
        named = [_said_in(file, arrow.parquet.read_schema).names for file in files]
        return list(dict.fromkeys(name for names in named for name in names))

    def read(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some columns, with missing values for cells whose table lacks a column."""
        arrow, files = self._files()
        parts = [_read(arrow, file, columns) for file in files]
        table = arrow.concat_tables(parts, promote_options="permissive").select(list(columns))
        first, stop = self._rows
        return to_frame(table.slice(first, stop - first))

    def _files(self) -> tuple[Any, list[Path]]:
        """Return pyarrow, and the tables, after comparing their row counts with the index."""
        arrow = import_arrow(self._folder, "scdl")
        if not Path(self._folder, "obs_features").is_dir():
            return arrow, []
        bounds, files = _saved(self._folder, "obs_features", self._n_rows)
        for file, first, stop in zip(files, bounds, bounds[1:], strict=False):
            n_rows = _said_in(file, arrow.parquet.read_metadata).num_rows
            if n_rows != stop - first:
                msg = f"{file}: has {n_rows} rows, but its index states {stop - first}"
                raise FormatError(f"{msg}; write the folder {self._folder.name} again")
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
    stored = _said_in(index, lambda path: np.load(path).astype(np.int64))
    bounds = np.maximum(stored, 0).ravel().tolist()
    n_tables = len(bounds) - 1
    if not n_tables and name == "obs_features":  # the cells have no labels
        return bounds, []
    files = [where / f"dataframe_{k:0{len(str(n_tables))}d}.parquet" for k in range(n_tables)]
    if not all(file.is_file() for file in files):
        files = sorted(where.rglob("*.parquet"))  # with other names, but of one save
    if len(files) != n_tables or len({len(file.name) for file in files}) > 1:
        msg = f"{where}: has {len(files)} tables, but `{index.name}` has {n_tables}"
        raise FormatError(f"{msg}; write the folder {folder.name} again")
    if bounds[-1] != n_rows:
        msg = f"{index}: covers {bounds[-1]} cells, not {n_rows}"
        raise FormatError(f"{msg}; write the folder {folder.name} again")
    return bounds, files


def _said_in(file: Path, read: Callable[[Path], Any]) -> Any:
    """Return the contents of a file.

    Raises
    ------
    FormatError
        It is missing or damaged.
    """
    try:
        return read(file)
    except (OSError, ValueError, EOFError) as error:
        said = str(error).splitlines()[0]
        raise FormatError(f"{file}: cannot be read ({said}); copy it again") from error


def _read(arrow: Any, file: Path, columns: Sequence[str] | None) -> Any:
    there = _said_in(file, arrow.parquet.read_schema).names
    wanted = None if columns is None else [name for name in columns if name in there]
    table = _said_in(file, lambda path: arrow.parquet.ParquetFile(path).read(columns=wanted))
    if columns is not None and not wanted:  # so that the number of rows is kept
        n_rows = arrow.parquet.read_metadata(file).num_rows
        return arrow.table({columns[0]: arrow.nulls(n_rows)})
    return table


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
        First row, and the one after the last.
    names
        Names of the columns, str, shape (n_columns,); None if they have none.
    n_columns
        Number of columns.
    """

    def __init__(
        self,
        folder: Location,
        arrays: FlatArrays,
        rows: tuple[int, int],
        names: NDArray[np.object_] | None,
        n_columns: int,
    ) -> None:
        used = (arrays.indices.path.name, arrays.data.path.name, arrays.indptr.path.name)
        files = FolderFiles(Path(folder), FileNames(*used), len(used))
        super().__init__(files, (rows[1] - rows[0], n_columns), arrays.data.dtype)
        self._location, self._arrays, self._rows, self._names = folder, arrays, rows, names

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        return super().var_names() if self._names is None else self._names

    def stored_bytes(self) -> int:
        """Return the size of its files in bytes, or the share of its rows in them."""
        n_bytes = int(self._files.sizes(np.arange(3)).sum())
        return round(n_bytes * self.shape[0] / max(1, self._arrays.n_rows))

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows in their stored form."""
        chunked = self.chunked()
        if can_cast(chunked.data.dtype, self.dtype):
            return super().read_rows(runs)
        lengths = chunked.ranges(expand(runs))[1]  # of float16
        bounds = chunked.indptr[runs]
        data, indices = (
            np.concatenate([mapped[:0], *(mapped[start:stop] for start, stop in bounds.tolist())])
            for mapped in (self._arrays.data.mapped(), self._arrays.indices.mapped())
        )
        ends = np.concatenate([[0], np.cumsum(lengths)])
        return CsrRows(ends, indices.astype(np.int64), data, chunked.n_columns)

    def _find(self) -> CsrChunks:
        self._files.check_unchanged(np.arange(3))
        first, stop = self._rows
        stored = self._arrays.indptr.mapped()[first : stop + 1]
        as_stored = np.dtype(stored.dtype.newbyteorder("=")) in (np.int64, np.uint64)
        pointer = stored.view(np.int64) if as_stored and stored.dtype.isnative else None
        pointer = stored.astype(np.int64) if pointer is None else pointer
        if np.any(pointer[1:] < pointer[:-1]) or not 0 <= pointer[0] <= pointer[-1]:
            msg = f"{self._location}: `{self._arrays.indptr.path.name}` does not ascend"
            raise FormatError(f"{msg}; it is damaged, copy or write it again")
        arrays = [
            pieced_array(
                array.path.name,
                Pieces(
                    files=np.array([file]),
                    offsets=np.array([array.offset]),
                    sizes=np.array([array.size]),
                    itemsize=array.dtype.itemsize,
                ),
                array.dtype,
                self._files,
            )
            for file, array in enumerate((self._arrays.indices, self._arrays.data))
        ]
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
        A data frame with a row for each cell, which replaces the table of the folder and is kept in
        memory.
    var
        A data frame with a row for each gene, indexed by gene name, which replaces the table of the
        folder.
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
        The number of rows of a table is not the number of cells or genes.

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
        rows, n_columns = (0, arrays.n_rows), arrays.n_columns
        names: NDArray[np.object_] | None = None
        if var is None and is_scdl(Path(self.location)):
            genes = _table_of(self.location, gene_tables(self.location, arrays.n_rows), part)
            names, n_columns, rows, var = names_of(genes.var), len(genes.var), genes.rows, genes.var
        elif part is not None:
            msg = f"{self.location}: `part` applies only to SCDL folders without a given `var`"
            raise ParameterError(f"{msg}; leave it out")
        elif var is not None:
            names = var.index.astype(str).to_numpy(object)
            n_columns = len(var) if n_columns is None else n_columns
        n_rows = rows[1] - rows[0]
        for table, name, n in ((obs, "obs", n_rows), (var, "var", n_columns)):
            if table is not None and len(table) != n:
                msg = f"`{name}` must have {n} rows, but has {len(table)}"
                raise ParameterError(f"{self.location}: {msg}")
        self._obs = ScdlObs(self.location, arrays.n_rows, rows) if obs is None else obs
        self._var = var
        self.elements = {"X": MappedCsr(self.location, arrays, rows, names, n_columns or 0)}

    def __repr__(self) -> str:
        return f"MemoryMapSource({str(self.location)!r})"

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return self._obs.names() if isinstance(self._obs, ScdlObs) else [*map(str, self._obs)]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        if isinstance(self._obs, ScdlObs):
            return self._obs.read(columns)
        return self._obs[[*columns]].reset_index(drop=True)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed as the given obs, or else by row number."""
        table = super().read_obs_rows(columns, rows)
        if not isinstance(self._obs, ScdlObs):
            table.index = self._obs.index[rows].astype(str).astype(object)
        return table

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        if self._var is None:
            return super().read_var()
        names = self.elements["X"].var_names()
        return self._var.set_index(pd.Index(names, dtype=object))


def open_memory_maps(folder: Location) -> list[Source]:
    """Open a folder as one source, or as one source for each table of genes of SCDL."""
    if not is_scdl(Path(folder)):
        return [MemoryMapSource(folder)]
    n_parts = len(gene_tables(folder, arrays_of(folder).n_rows))
    return [MemoryMapSource(folder, part=part) for part in range(n_parts)]


def _table_of(folder: Location, tables: Sequence[GeneTable], part: int | None) -> GeneTable:
    if part is None and len(tables) > 1:
        msg = f"{folder}: has cells of {len(tables)} tables of genes"
        raise FormatError(f"{msg}; give the folder to `open_collection`, or one `part` of it")
    if part is not None and not 0 <= part < len(tables):
        msg = f"`0 <= part < {len(tables)}` must hold, but got part={part}"
        raise ParameterError(f"{folder}: {msg}")
    return tables[part or 0]


# Folders of memory maps.


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has X
    return open_memory_maps(location)


SCDL = Storage(
    name="BioNeMo SCDL",
    open=_open,
    suffixes=(".scdl",),
    recognizes=is_scdl,
    extra="scdl",
    facts=StorageFacts(
        recognized="a folder with `data.npy`, `col_ptr.npy` and `row_ptr.npy`; BioNeMo's object",
        reading="fast: arrays are read directly from the files; float16 by NumPy",
    ),
)
MEMORY_MAPS = Storage(
    name="memory-mapped CSR",
    open=_open,
    recognizes=is_npy_folder,
    facts=StorageFacts(
        recognized="a folder of `scipy.sparse.save_npz`, uncompressed and unzipped",
        reading="fast: arrays are read directly from the files; float16 by NumPy",
        labels="columns of the `obs` given to `MemoryMapSource`",
    ),
)
