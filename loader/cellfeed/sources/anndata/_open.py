"""Stored AnnData and MuData: opening a file, and each of its elements with the class that reads it.

MuData's format: https://mudata.readthedocs.io/en/latest/notebooks/quickstart_mudata.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed._lazy import pd
from cellfeed.bytes import SCHEMES, Location, has_suffix
from cellfeed.bytes._tables import Tables, pack, unpack
from cellfeed.rows import ObsColumn
from cellfeed.sources._registry import Storage, opened_by
from cellfeed.sources._source import StoredElement
from cellfeed.sources.anndata import _annotations as frames
from cellfeed.sources.anndata._file import (
    AnnDataFile,
    FileSource,
    check_sizes,
    damage_named,
    is_group,
    other_format_of,
    table_length,
    text,
    texts,
)
from cellfeed.sources.anndata._h5file import H5File, LocalH5File, RemoteH5File
from cellfeed.sources.anndata._matrix import (
    StoredCsr,
    StoredDense,
    StoredMatrix,
)
from cellfeed.sources.anndata._zarr import (
    LocalZarrStore,
    RemoteZarrStore,
    anndata_groups,
    is_zarr,
)


class AnnDataSource(FileSource):
    """Elements of an AnnData or MuData file or store, with its obs.

    Parameters
    ----------
    file
        The file or store.
    elements
        The elements, at least one.
    """

    def __init__(self, file: AnnDataFile, elements: Mapping[str, StoredElement]) -> None:
        super().__init__(file)
        self._obs_rows = frames.Table(file)
        self.elements = dict(elements)

    def obs_names(self) -> tuple[str, ...]:
        """Return the names of the obs columns."""

        def names() -> Tables:
            with damage_named(self._file.location, "obs"):
                return pack(frames.obs_names(self._file))

        return tuple(unpack(self._file.recorded("obs", names)))

    def refused_obs(self, name: str) -> str:
        """Return that obs of a modality is not read; empty for other columns."""
        if ":" not in name or _lacks(self._file, "mod"):
            return ""
        msg = f"{self._file.location}: obs has no column {name!r}; copy columns of modalities to it"
        return f"{msg} with `mdata.pull_obs()`, and write the file again"

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read rows of obs columns, indexed by the names of the cells."""
        with self._unchanged():
            return self._obs_rows.read(columns, rows, are_named=True)

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        return self.read_table("var")

    def stored_elements(self) -> dict[str, str]:
        """Return the encoding of each element in the file, also of those that were not opened.

        Returns
        -------
        "dense", "csr", "csc", "dataframe" or another encoding of anndata, by name of the element.

        Raises
        ------
        FormatError
            The file is MuData.
        """
        with damage_named(self._file.location, "X"):
            if not _lacks(self._file, "mod"):
                msg = f"{self._file.location}: is MuData, whose elements are not listed; name them"
                remedy = "or write one modality as AnnData: `mdata[name].write_h5ad(path)`"
                raise FormatError(f"{msg}, {remedy}")
            return _encodings(self._file)

    def read_table(self, name: str) -> pd.DataFrame:
        """Read a table of genes, such as ``raw/var``."""
        with damage_named(self._file.location, name):
            return frames.read_var(self._file, name)

    def plain_obs(self, columns: Sequence[str]) -> Mapping[str, ObsColumn]:
        """Return those obs columns that can be read without pandas."""
        with self._unchanged(), damage_named(self._file.location, "obs"):
            return frames.plain_obs(self._file, columns)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        with self._unchanged(), damage_named(self._file.location, "obs"):
            return frames.read_obs(self._file, columns)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Check that the file has not changed once it is read, also where it seems damaged."""
        try:
            yield
        except FormatError:
            self._file.check_unchanged()
            raise
        self._file.check_unchanged()


def modalities(root: Any) -> tuple[str, ...]:
    """Return the names of the modalities, in mudata's order."""
    names = sorted(root["mod"])
    order = texts(root["mod"], "mod-order")
    return order if sorted(order) == names else tuple(names)


def rows_of_cells(file: AnnDataFile, modality: str) -> NDArray[np.int64] | None:
    """Return the row of each cell of a file in a modality, which must have all cells.

    Parameters
    ----------
    file, modality
        A MuData file, and one of its `modalities`.

    Returns
    -------
    int64, shape (n_cells,); None if rows are stored in the order of the cells.

    Raises
    ------
    FormatError
        The modality lacks cells, or the file does not map its rows to cells.
    """
    name = f"obsmap/{modality}"
    with damage_named(file.location, name):
        if _lacks(file, name):
            msg = f"{file.location}: has no `{name}`, which maps its rows to cells"
            raise FormatError(f"{msg}; write the file again with mudata")
        n_cells = table_length(file, "obs")
        check_sizes(file, name, n_cells)
        # mudata counts from 1, and writes 0 where there is none.
        rows = np.asarray(file.stored(name)[...]).reshape(-1).astype(np.int64) - 1
        n_rows = table_length(file, f"mod/{modality}/obs")
    there = rows[rows >= 0]
    is_one_each = there.size == n_rows and there.max(initial=-1) < n_rows
    is_one_each = is_one_each and bool((np.bincount(there, minlength=n_rows) == 1).all())
    if rows.size != n_cells or not is_one_each:
        msg = f"{file.location}: `{name}` does not map each of {n_rows:,} rows to one of"
        raise FormatError(f"{msg} {n_cells:,} cells; write the file again with mudata")
    if n_lacking := rows.size - there.size:
        msg = (
            f"{file.location}: modality {modality!r} lacks {n_lacking:,} of {rows.size:,} "
            f"cells; write only the cells that it has, `mdata[mdata.obsmap[{modality!r}] > "
            "0].copy()`, and read that file"
        )
        raise FormatError(msg)
    return None if np.array_equal(rows, np.arange(rows.size)) else rows


def open_sources(location: Location, elements: Sequence[str] = ("X",)) -> list[FileSource]:
    """Open an ``.h5ad`` file of any version, an ``.h5mu`` file, a zarr store, or ``.h5`` of 10x.

    Parameters
    ----------
    location
        The file, folder or URL.
    elements
        Names of the elements: ``X``, ``layers/NAME``, ``raw/X``, ``obsm/NAME``; in MuData these
        after ``mod/MODALITY/``, or ``obsm/NAME``.

    Returns
    -------
    One source, or one for each dataset of a shuffled collection, in the order of their numbers.

    Raises
    ------
    PathError
        There is no such file.
    FormatError
        It is truncated or neither AnnData nor MuData, lacks an element or cells of a modality, or
        stores an element in CSC format.
    """
    return [_open_source(file, elements) for file in _files(location)]


_HDF5 = (".h5ad", ".h5mu", ".h5", ".hdf5", ".loom", ".h5seurat")  # of URLs


def _files(location: Location) -> Sequence[AnnDataFile]:
    if location.path is None:
        if has_suffix(location.name, *_HDF5):
            return [RemoteH5File(location)]
        return [RemoteZarrStore(group) for group in anndata_groups(location)]
    if is_zarr(location.path):
        return [LocalZarrStore(group) for group in anndata_groups(location)]
    return [LocalH5File(location.path)]


def _is_anndata(path: Path) -> bool:
    if path.is_dir():
        return is_zarr(path)
    return has_suffix(path.name, ".h5ad", ".h5mu") or h5py.is_hdf5(path)


ANNDATA = Storage(
    name="AnnData",
    open=open_sources,
    schemes=SCHEMES,
    suffixes=(".h5ad", ".h5mu", ".zarr"),
    recognizes=_is_anndata,
)


_RECORDED: dict[str, type[StoredMatrix]] = {"csr": StoredCsr, "dense": StoredDense}


def _open_source(file: AnnDataFile, elements: Sequence[str]) -> FileSource:
    opened = list[FileSource]()

    def described() -> Tables | None:
        opened[:] = [_examine_source(file, elements)]
        found = {
            name: (each.layout, each.described())
            for name, each in opened[0].elements.items()
            if type(each) in _RECORDED.values() and isinstance(each, StoredMatrix)
        }
        is_plain = isinstance(opened[0], AnnDataSource) and len(found) == len(elements)
        return pack(found) if is_plain and all(own for _, own in found.values()) else None

    found = file.recorded(f"elements {list(elements)}", described)
    if opened or found is None:
        return opened[0]
    recorded = unpack(found).items()
    return AnnDataSource(
        file, {name: _RECORDED[layout].of_described(file, own) for name, (layout, own) in recorded}
    )


def _examine_source(file: AnnDataFile, elements: Sequence[str]) -> FileSource:
    path, root = file.location, file()
    with damage_named(path, next(iter(elements), "X")):
        if _lacks(file, "obs") or _lacks(file, "var"):
            is_hdf5 = isinstance(file, H5File)
            other: FileSource | None = opened_by("open_hdf5", file) if is_hdf5 else None
            if other is not None:
                return other
            what = other_format_of(root) or (
                "not an AnnData file, since it has no `obs` or no `var`; write it with anndata"
            )
            raise FormatError(f"{path}: is {what}")
        names = list(root) if isinstance(root, h5py.Group) else root  # without following links
        has_modalities = "mod" in names and not _lacks(file, "mod")
    rows_of = cache(partial(rows_of_cells, file))  # of each modality, which may have many elements
    opened = dict[str, StoredElement]()
    for element in elements:
        with damage_named(path, element):
            if has_modalities:
                opened[element] = _open_of_mudata(file, element, rows_of)
            elif element.startswith("mod/"):
                within = element.split("/", 2)[-1]
                msg = f"{path}: is AnnData, which has no modalities"
                raise FormatError(f"{msg}; read `{within}`, not `{element}`")
            else:
                opened[element] = _open_element(file, element)
    sparse = [each for each in opened.values() if isinstance(each, StoredCsr)]
    for each, before in combinations(reversed(sparse), 2):
        each.share_indices(before)
    return AnnDataSource(file, opened)


def _open_of_mudata(
    file: AnnDataFile,
    element: str,
    rows_of: Callable[[str], NDArray[np.int64] | None],
) -> StoredElement:
    """Open an element of MuData with a row for each cell of all modalities."""
    if element.startswith("obsm/"):
        return _open_element(file, element)
    known = modalities(file())
    if not element.startswith("mod/"):
        there = ", ".join(f"`mod/{modality}/{element}`" for modality in known)
        msg = f"{file.location}: is MuData"
        raise FormatError(f"{msg}; give the modality of `{element}`, one of: {there or 'none'}")
    _, modality, within = element.split("/", 2)
    if modality not in known:
        there = ", ".join(known) or "none"
        msg = f"{file.location}: has no modality {modality!r}; its modalities are: {there}"
        raise FormatError(msg)
    stored = _open_element(file, within, f"mod/{modality}/")
    stored.row_order = rows_of(modality)
    return stored


def _open_element(file: AnnDataFile, name: str, within: str = "") -> StoredMatrix:
    """Open an array of an AnnData object.

    Parameters
    ----------
    file, name
        The file, and the name of the element in the object.
    within
        Path of the object in the file, such as ``mod/rna/``.
    """
    path = file.location
    folder = name.partition("/")[0]
    tables = {"raw": "raw/var", "obsm": None}
    if name == "raw/X" and not _lacks(file, f"{within}raw.X"):  # anndata before 0.7
        name, tables["raw"] = "raw.X", "raw.var"
    var, element = tables.get(folder, "var"), within + name
    if _lacks(file, element):
        raise FormatError(f"{path}: has no `{element}`; {_alternatives(file, within, folder)}")
    stored = file.stored(element)
    where = file, element, None if var is None else within + var, f"{within}obs"
    if not is_group(stored):
        return StoredDense(*where)
    encoding = _sparse_encoding(stored)
    if encoding == "csr":
        return StoredCsr(*where)
    if encoding == "csc":
        msg = (
            f"{path}: `{element}` is stored by gene (CSC), so reading a cell would require "
            "reading the whole file; make it CSR with anndata, as in `adata.X = adata.X.tocsr()`, "
            "and write it again"
        )
    else:
        msg = (
            f"{path}: `{element}` is neither dense nor CSR (encoding {encoding!r}); write it as an "
            "array or a CSR matrix, with anndata, as in `adata.obsm[name] = frame.to_numpy()`"
        )
    raise FormatError(msg)


def _lacks(file: AnnDataFile, name: str) -> bool:
    """Return whether there is no such element; a link that leads to nothing is an error."""
    try:
        file.stored(name)
    except KeyError:
        return name not in file()
    return False


def _alternatives(file: AnnDataFile, within: str, folder: str) -> str:
    if folder == "raw":
        return "read `X` instead, or set `adata.raw` before writing"
    folder = "obsm" if folder == "obsm" else "layers"
    there = [] if _lacks(file, within + folder) else sorted(file.stored(within + folder))
    if folder == "obsm":
        return f"its obsm has: {', '.join(there) or 'nothing'}"
    return f"its layers are: {', '.join(there) or 'none'}"


def _encodings(file: AnnDataFile) -> dict[str, str]:
    """Return the encoding of each element of an AnnData object."""
    is_old = not _lacks(file, "raw.X")
    there = [] if _lacks(file, "X") else ["X"]
    if is_old or not _lacks(file, "raw/X"):
        there.append("raw/X")
    for folder in ("layers", "obsm"):
        if not _lacks(file, folder):
            stored = file.stored(folder)
            names = stored if is_group(stored) else stored.dtype.names or ()
            there += [f"{folder}/{name}" for name in names]
    found = dict[str, str]()
    for name in there:
        path = "raw.X" if is_old and name == "raw/X" else name
        stored = None if _lacks(file, path) else file.stored(path)
        # What is not there is a field of a compound dataset, as anndata wrote obsm before 0.7.
        is_array = stored is None or not is_group(stored)
        encoding = "dense" if is_array else _sparse_encoding(stored)
        if stored is None or text(stored, "encoding-type") != "null":  # None
            found[name] = encoding
    return found


def _sparse_encoding(group: Any) -> str:
    """Return "csr", "csc" or another encoding of the group."""
    encoding = text(group, "encoding-type")
    encoding = encoding or text(group, "h5sparse_format", "unknown")  # anndata before 0.7
    return {"csr_matrix": "csr", "csc_matrix": "csc"}.get(encoding, encoding)
