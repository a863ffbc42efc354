"""Opening stored AnnData: locating an element, and choosing the class that reads it."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import SCHEMES, Location, check_unbuffered
from cellfeed._errors import FormatError
from cellfeed._storages._anndata._attributes import is_group, text
from cellfeed._storages._anndata._damage import damage_named, other_format_of
from cellfeed._storages._anndata._h5file import AnnDataFile
from cellfeed._storages._anndata._local_h5file import LocalH5File
from cellfeed._storages._anndata._matrix import StoredCsr, StoredDense, StoredFrame, StoredMatrix
from cellfeed._storages._anndata._remote_h5file import RemoteH5File
from cellfeed._storages._anndata._source import (
    AnnDataSource,
    MuDataSource,
    is_mudata,
    modalities,
    rows_of_cells,
)
from cellfeed._storages._anndata._zarr import (
    LocalZarrStore,
    RemoteZarrStore,
    anndata_groups,
    is_zarr,
    metadata_of,
    remote_groups,
)
from cellfeed._storages._base import Source, Storage, StorageFacts, StoredElement


def open_sources(location: Location, elements: Sequence[str] = ("X",)) -> list[Source]:
    """Open an ``.h5ad`` file of any version, an ``.h5mu`` file, or a zarr store.

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


def _files(location: Location) -> Sequence[AnnDataFile]:
    if location.path is None:
        if location.name.endswith((".h5ad", ".h5mu", ".h5", ".hdf5")):
            return [RemoteH5File(location)]
        return [RemoteZarrStore(group) for group in remote_groups(location)]
    metadata = metadata_of(location.path)
    if location.options.unbuffered:
        check_unbuffered(metadata or location.path)
    if metadata is not None:
        groups = anndata_groups(location.path)
        return [LocalZarrStore(group, location.options) for group in groups]
    return [LocalH5File(location.path, location.options)]


def _is_anndata(path: Path) -> bool:
    if path.is_dir():
        return is_zarr(path)
    return path.suffix in (".h5ad", ".h5mu") or h5py.is_hdf5(path)


ANNDATA = Storage(
    name="AnnData",
    open=open_sources,
    schemes=SCHEMES,
    suffixes=(".h5ad", ".h5mu", ".zarr"),
    recognizes=_is_anndata,
    reads_directly=True,
    facts=StorageFacts(
        recognized="`.h5ad`, `.h5mu` and zarr, by content; stores of `cellfeed preshuffle`",
        reading="fast: cellfeed decodes chunks (gzip, zstd, lz4, blosc, lzf or none); h5py or "
        "zarr read what `Collection.describe` names",
        remote="web servers, S3 and similar (`cellfeed[remote]`)",
    ),
)


def _open_source(file: AnnDataFile, elements: Sequence[str]) -> Source:
    path, root = file.location, file()
    with damage_named(path, elements[0]):
        if _lacks(file, "obs") or _lacks(file, "var"):
            what = other_format_of(root) or (
                "not an AnnData file, since it has no `obs` or no `var`; write it with anndata"
            )
            raise FormatError(f"{path}: is {what}")
        has_modalities = is_mudata(root)
    rows_of = cache(partial(rows_of_cells, file))  # of each modality, which may have many elements
    opened = dict[str, StoredElement]()
    for element in elements:
        with damage_named(path, element):
            if has_modalities:
                opened[element] = _open_of_mudata(file, element, rows_of)
            elif element.startswith("mod/"):
                within = element.split("/", 2)[-1]
                msg = (
                    f"{path}: is AnnData, which has no modalities; read `{within}`, not `{element}`"
                )
                raise FormatError(msg)
            else:
                opened[element] = _open_element(file, element)
    return MuDataSource(file, opened) if has_modalities else AnnDataSource(file, opened)


def _open_of_mudata(
    file: AnnDataFile, element: str, rows_of: Callable[[str], NDArray[np.int64] | None]
) -> StoredElement:
    """Open an element of MuData with a row for each cell of all modalities."""
    if element.startswith("obsm/"):
        return _open_element(file, element)
    known = modalities(file())
    if not element.startswith("mod/"):
        there = ", ".join(f"`mod/{modality}/{element}`" for modality in known)
        msg = (
            f"{file.location}: is MuData; give the modality of `{element}`, one of: "
            f"{there or 'none'}"
        )
        raise FormatError(msg)
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
    path, root = file.location, file()
    folder = name.partition("/")[0]
    tables = {"raw": "raw/var", "obsm": None}
    if name == "raw/X" and f"{within}raw.X" in root:  # anndata before 0.7
        name, tables["raw"] = "raw.X", "raw.var"
    var, element = tables.get(folder, "var"), within + name
    if _lacks(file, element):
        raise FormatError(f"{path}: has no `{element}`; {_alternatives(root, within, folder)}")
    stored = file.stored(element)
    where = file, element, None if var is None else within + var, f"{within}obs"
    if not is_group(stored):
        return StoredDense(*where)
    encoding = _sparse_encoding(stored)
    if encoding == "csr":
        return StoredCsr(*where)
    if encoding == "dataframe" and folder == "obsm":
        return StoredFrame(file, element, f"{within}obs")
    if encoding == "csc":
        msg = (
            f"{path}: `{element}` is stored by gene (CSC), so reading a cell would require "
            "reading the whole file; rewrite it by cell with "
            f"`{_in_python(name, within)}.tocsr()`"
        )
    else:
        msg = (
            f"{path}: `{element}` is neither dense nor CSR (encoding {encoding!r}); write it as an "
            "array or a CSR matrix, with anndata"
        )
    raise FormatError(msg)


def _lacks(file: AnnDataFile, name: str) -> bool:
    """Return whether there is no such element; a link that leads to nothing is an error."""
    try:
        file.stored(name)
    except KeyError:
        return name not in file()
    return False


def _alternatives(root: Any, within: str, folder: str) -> str:
    if folder == "raw":
        return "read `X` instead, or set `adata.raw` before writing"
    if folder == "obsm":
        names = ", ".join(sorted(root[f"{within}obsm"])) if f"{within}obsm" in root else ""
        return f"its obsm has: {names or 'nothing'}"
    layers = ", ".join(sorted(root[f"{within}layers"])) if f"{within}layers" in root else ""
    return f"its layers are: {layers or 'none'}"


def _sparse_encoding(group: Any) -> str:
    """Return "csr", "csc" or another encoding of the group."""
    legacy = text(group, "h5sparse_format")  # anndata before 0.7
    encoding = legacy or text(group, "encoding-type", "unknown")
    return {"csr_matrix": "csr", "csc_matrix": "csc"}.get(encoding, encoding)


def _in_python(name: str, within: str) -> str:
    adata = f"mdata[{within.split('/')[1]!r}]" if within else "adata"
    folder, _, key = name.partition("/")
    is_keyed = folder in ("layers", "obsm")
    return f"{adata}.{folder}[{key!r}]" if is_keyed else f"{adata}.{name.replace('/', '.')}"
