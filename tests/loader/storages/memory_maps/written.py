"""Writes folders of memory maps."""

import importlib

import anndata as ad
import numpy as np


def write_npy(folder, matrix):
    """Write the arrays of a CSR matrix, as `scipy.sparse.save_npz` names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("data", "indices", "indptr"):
        np.save(folder / f"{name}.npy", getattr(matrix, name))
    np.save(folder / "shape.npy", np.array(matrix.shape))
    return folder


def make_scdl(folder, X, obs, var, **options):
    """Return BioNeMo's own object, which is not saved."""
    scdl = importlib.import_module("bionemo.scdl.io.single_cell_memmap_dataset")
    h5ad = folder.with_suffix(".h5ad")
    ad.AnnData(X, obs=obs, var=var).write_h5ad(h5ad)
    options = {"h5ad_path": str(h5ad), "use_X_not_raw": True, **options}
    made = scdl.SingleCellMemMapDataset(str(folder), **options)
    h5ad.unlink()
    return made


def write_scdl(folder, X, obs, var, **options):
    """Write a folder with BioNeMo itself."""
    make_scdl(folder, X, obs, var, **options).save()
    return folder
