"""AnnData in storage: h5ad files and zarr stores."""

from cellfeed._sources._anndata._gene_names import as_names
from cellfeed._sources._anndata._open import ANNDATA, open_sources

__all__ = ["ANNDATA", "as_names", "open_sources"]
