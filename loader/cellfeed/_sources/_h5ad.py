"""AnnData files: which element is the matrix, how it is stored, and who reads it."""

from pathlib import Path
from typing import Any

import h5py

from cellfeed._errors import FormatError
from cellfeed._sources._base import Source
from cellfeed._sources._h5ad_common import damage_named
from cellfeed._sources._h5ad_csr import H5adCsr
from cellfeed._sources._h5ad_dense import H5adDense
from cellfeed._sources._h5file import H5File

__all__ = ["open_h5ad"]


def open_h5ad(path: Path, *, layer: str | None = None) -> Source:
    """Open one ``.h5ad`` file of any age that anndata reads.

    Parameters
    ----------
    path
        The file.
    layer
        The layer to read; ``X`` if None.

    Raises
    ------
    PathError
        There is no such file.
    FormatError
        The file is truncated or not AnnData, lacks the layer, or stores it as CSC.
    """
    file = H5File(path)
    root = file()
    element = "X" if layer is None else f"layers/{layer}"
    with damage_named(path, element):
        if "obs" not in root or "var" not in root:
            msg = f"{path}: not an AnnData file: it has no `obs` or no `var`; write it with anndata"
            raise FormatError(msg)
        if element not in root:
            layers = ", ".join(root["layers"]) if "layers" in root else ""
            msg = f"{path}: has no `{element}`; its layers are: {layers or 'none'}"
            raise FormatError(msg)
        stored = root[element]
        if isinstance(stored, h5py.Dataset):
            return H5adDense(file, element)
        encoding = _sparse_encoding(stored)
    if encoding == "csr":
        return H5adCsr(file, element)
    if encoding == "csc":
        msg = (
            f"{path}: `{element}` is stored by gene (CSC), so reading a cell means reading the "
            f"whole file; rewrite it by cell with `adata.{_in_python(layer)}.tocsr()`"
        )
    else:
        msg = f"{path}: `{element}` is neither dense nor CSR (encoding {encoding!r})"
    raise FormatError(msg)


def _sparse_encoding(group: h5py.Group) -> str:
    """Return "csr", "csc" or what else the group says that it is."""
    legacy = group.attrs.get("h5sparse_format")  # anndata before 0.7
    if legacy is not None:
        return legacy.decode() if isinstance(legacy, bytes) else str(legacy)
    encoding: Any = group.attrs.get("encoding-type", "unknown")
    return {"csr_matrix": "csr", "csc_matrix": "csc"}.get(encoding, str(encoding))


def _in_python(layer: str | None) -> str:
    return "X" if layer is None else f"layers[{layer!r}]"
