"""AnnData objects in storage: where an element lies, how it is stored, and who reads it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py

from cellfeed._bytes import Location
from cellfeed._errors import FormatError
from cellfeed._sources._anndata._csr import StoredCsr
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._dense import StoredDense
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._sources._anndata._h5file import H5File
from cellfeed._sources._anndata._source import AnnDataSource
from cellfeed._sources._anndata._zarr_groups import anndata_groups, is_zarr
from cellfeed._sources._anndata._zarr_store import ZarrStore
from cellfeed._sources._base import Source, StoredElement
from cellfeed._sources._storages import Storage

__all__ = ["ANNDATA", "open_sources"]


def open_sources(path: Path, elements: Sequence[str] = ("X",)) -> list[Source]:
    """Open one ``.h5ad`` file of any age, or what a zarr store holds.

    Parameters
    ----------
    path
        The file or folder.
    elements
        What is read: ``X``, ``layers/NAME``, ``raw/X``, ``obsm/NAME``.

    Returns
    -------
    One source, or one for each data set of a shuffled collection, in the order of their numbers.

    Raises
    ------
    PathError
        There is no such file.
    FormatError
        It is truncated or not AnnData, lacks an element, or stores it as CSC.
    """
    files: list[AnnDataFile]
    if is_zarr(path):
        files = [ZarrStore(group) for group in anndata_groups(path)]
    else:
        files = [H5File(path)]
    return [
        AnnDataSource(file, {element: _open_element(file, element) for element in elements})
        for file in files
    ]


def _is_anndata(path: Path) -> bool:
    if path.is_dir():
        return is_zarr(path)
    return path.suffix == ".h5ad" or h5py.is_hdf5(path)


def _open(location: Location, elements: Sequence[str]) -> list[Source]:
    return open_sources(Path(location), elements)


ANNDATA = Storage(name="AnnData", open=_open, suffixes=(".h5ad", ".zarr"), recognizes=_is_anndata)


def _open_element(file: AnnDataFile, element: str) -> StoredElement:
    path, root = file.path, file()
    with damage_named(path, element):
        if "obs" not in root or "var" not in root:
            msg = f"{path}: not an AnnData file: it has no `obs` or no `var`; write it with anndata"
            raise FormatError(msg)
        folder = element.partition("/")[0]
        var = {"raw": "raw/var", "obsm": None}.get(folder, "var")
        if element == "raw/X" and "raw.X" in root:  # anndata before 0.7
            element, var = "raw.X", "raw.var"
        if element not in root:
            raise FormatError(f"{path}: has no `{element}`; {_alternatives(root, folder)}")
        stored = root[element]
        if hasattr(stored, "dtype"):
            return StoredDense(file, element, var)
        encoding = _sparse_encoding(stored)
    if encoding == "csr":
        return StoredCsr(file, element, var)
    if encoding == "csc":
        msg = (
            f"{path}: `{element}` is stored by gene (CSC), so reading a cell means reading the "
            f"whole file; rewrite it by cell with `adata.{_in_python(element)}.tocsr()`"
        )
    elif encoding == "dataframe":
        msg = (
            f"{path}: `{element}` is a data frame; write it as an array, such as "
            f"`adata.{_in_python(element)}.to_numpy()`"
        )
    else:
        msg = f"{path}: `{element}` is neither dense nor CSR (encoding {encoding!r})"
    raise FormatError(msg)


def _alternatives(root: Any, folder: str) -> str:
    if folder == "raw":
        return "read `X` instead, or set `adata.raw` before writing"
    if folder == "obsm":
        names = ", ".join(sorted(root["obsm"])) if "obsm" in root else ""
        return f"its obsm has: {names or 'nothing'}"
    layers = ", ".join(sorted(root["layers"])) if "layers" in root else ""
    return f"its layers are: {layers or 'none'}"


def _sparse_encoding(group: Any) -> str:
    """Return "csr", "csc" or what else the group says that it is."""
    legacy = group.attrs.get("h5sparse_format")  # anndata before 0.7
    if legacy is not None:
        return legacy.decode() if isinstance(legacy, bytes) else str(legacy)
    encoding: Any = group.attrs.get("encoding-type", "unknown")
    return {"csr_matrix": "csr", "csc_matrix": "csc"}.get(encoding, str(encoding))


def _in_python(element: str) -> str:
    folder, _, name = element.partition("/")
    return f"{folder}[{name!r}]" if folder in ("layers", "obsm") else element.replace("/", ".")
