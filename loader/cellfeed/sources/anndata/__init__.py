"""AnnData in storage: h5ad files and zarr stores; extensions read or copy their parts."""

from cellfeed.sources.anndata import _annotations as frames
from cellfeed.sources.anndata._file import (
    FileSource,
    check_sizes,
    damage_named,
    is_group,
    own_members,
)
from cellfeed.sources.anndata._h5file import H5File, LocalH5File, RemoteH5File
from cellfeed.sources.anndata._matrix import StoredCsr
from cellfeed.sources.anndata._open import ANNDATA, AnnDataSource
from cellfeed.sources.anndata._zarr import DATASETS

__all__ = [
    "ANNDATA",
    "DATASETS",
    "AnnDataSource",
    "FileSource",
    "H5File",
    "LocalH5File",
    "RemoteH5File",
    "StoredCsr",
    "check_sizes",
    "damage_named",
    "frames",
    "is_group",
    "own_members",
]
