"""AnnData in storage: h5ad files and zarr stores."""

from cellfeed._storages._anndata._matrix import StoredCsc
from cellfeed._storages._anndata._open import ANNDATA, AnnDataSource, open_sources, open_to_copy
from cellfeed._storages._anndata._tenx import TenxSource
