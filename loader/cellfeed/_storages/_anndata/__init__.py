"""AnnData in storage: h5ad files and zarr stores."""

from cellfeed._storages._anndata._annotations import as_names
from cellfeed._storages._anndata._open import ANNDATA, open_sources
from cellfeed._storages._anndata._tenx import TenxSource
