"""AnnData in storage: h5ad files and zarr stores."""

from cellfeed._sources._anndata._open import open_sources
from cellfeed._sources._anndata._zarr_groups import is_zarr

__all__ = ["is_zarr", "open_sources"]
