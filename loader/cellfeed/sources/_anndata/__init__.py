"""AnnData in storage: h5ad files and zarr stores."""

from cellfeed.sources._anndata._open import ANNDATA, AnnDataSource, open_sources
