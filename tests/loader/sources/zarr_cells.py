"""Writes AnnData as zarr stores, whose arrays lie as a test says."""

from pathlib import Path
from typing import Any

import anndata as ad
import numcodecs
import numpy as np
import pandas as pd
import pytest
import zarr
from anndata.io import write_elem
from tests.loader.zarr_stores import written_at_once
from zarr.codecs.numcodecs import AsType, Delta

__all__ = ["as_type", "delta", "quiet", "write_cells"]

# What zarr and anndata say when these stores are written, also where workers are spawned.
quiet = pytest.mark.filterwarnings(
    "ignore:.*does not have a Zarr V3 specification",
    "ignore:Combining a `sharding_indexed` codec disables",
    "ignore:Consolidated metadata is currently not part",
    "ignore:Numcodecs codecs are not in the Zarr version 3 specification",
    "ignore:Writing zarr v2 data will no longer be the default",
    "ignore:zarr v3 autosharding will be the default",
)


def write_cells(
    path: Path,
    X: Any,
    /,
    *,
    zarr_format: Any = 3,
    element: str = "X",
    obs: pd.DataFrame | None = None,
    var: pd.DataFrame | None = None,
    **arrays: dict[str, Any],
) -> Path:
    """Write a store as anndata would, but for how its matrix is stored.

    Parameters
    ----------
    X
        An array, or whatever has the parts of a CSR matrix.
    arrays
        Options of zarr: of ``X`` if it is dense, else of ``indptr``, ``indices`` and ``data``.
    """
    encoding = {"encoding-type": "anndata", "encoding-version": "0.1.0"}
    tables = [
        pd.DataFrame(index=[f"{name}{k}" for k in range(n)]) if table is None else table
        for name, n, table in zip(("cell", "gene"), X.shape, (obs, var), strict=False)
    ]
    with written_at_once(path) as memory, ad.settings.override(allow_write_nullable_strings=True):
        root = zarr.create_group(memory, zarr_format=zarr_format, attributes=encoding)
        write_elem(root, "obs", tables[0])
        write_elem(root, "var", tables[1])
        if element.startswith("raw/"):
            write_elem(root.require_group("raw"), "var", tables[1])
        if isinstance(X, np.ndarray):
            encoding = {"encoding-type": "array", "encoding-version": "0.2.0"}
            create(root, element, X, attributes=encoding, **arrays.get("X", {}))
            return path
        group = root.create_group(element)
        encoding = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
        group.attrs.update(encoding | {"shape": [*X.shape]})
        for name in ("indptr", "indices", "data"):
            create(group, name, getattr(X, name), **arrays.get(name, {}))
    return path


def create(group: zarr.Group, name: str, values: Any, **options: Any) -> None:
    """Write an array, whose dtype in the store may be another one."""
    array = group.create_array(name, shape=values.shape, **{"dtype": values.dtype} | options)
    if values.size:
        array[...] = values


def delta(dtype: str, zarr_format: int = 3) -> Any:
    return numcodecs.Delta(dtype) if zarr_format == 2 else Delta(dtype=dtype)


def as_type(narrow: str, wide: str, zarr_format: int = 3) -> Any:
    if zarr_format == 2:
        return numcodecs.AsType(narrow, wide)
    return AsType(encode_dtype=narrow, decode_dtype=wide)
