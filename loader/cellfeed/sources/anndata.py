"""Files and stores of AnnData, for extensions that read or copy their parts."""

from cellfeed.sources._anndata import ANNDATA, AnnDataSource
from cellfeed.sources._anndata import _annotations as frames
from cellfeed.sources._anndata._file import (
    AnnDataFile,
    FileSource,
    check_sizes,
    damage_named,
    is_group,
    own_members,
)
from cellfeed.sources._anndata._h5file import H5File, LocalH5File, RemoteH5File
from cellfeed.sources._anndata._matrix import StoredCsr
from cellfeed.sources._anndata._zarr import DATASETS
from cellfeed.sources._in_memory import AnnDataObjectSource

__all__ = [
    "ANNDATA",
    "DATASETS",
    "AnnDataFile",
    "AnnDataObjectSource",
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
