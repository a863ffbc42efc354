"""Writes folders of memory maps."""

import importlib
import zipfile

import anndata as ad
import numpy as np
import scipy.sparse as sp


def write_npy(folder, case_or_matrix):
    """Write the arrays of a CSR matrix, as those of an unzipped `scipy.sparse.save_npz` are."""
    folder.mkdir(parents=True, exist_ok=True)
    if sp.issparse(case_or_matrix):
        sp.save_npz(folder / "X.npz", sp.csr_matrix(case_or_matrix), compressed=False)
        with zipfile.ZipFile(folder / "X.npz") as archive:
            archive.extractall(folder)
        (folder / "X.npz").unlink()
        return folder
    for name in ("data", "indices", "indptr"):
        np.save(folder / f"{name}.npy", getattr(case_or_matrix, name))
    np.save(folder / "shape.npy", np.array(case_or_matrix.shape))
    return folder


def write_scdl(folder, X, obs, var, **options):
    """Write a folder with BioNeMo itself."""
    scdl = importlib.import_module("bionemo.scdl.io.single_cell_memmap_dataset")
    h5ad = folder.with_suffix(".h5ad")
    ad.AnnData(X, obs=obs, var=var).write_h5ad(h5ad)
    written = scdl.SingleCellMemMapDataset(
        str(folder), h5ad_path=str(h5ad), use_X_not_raw=True, **options
    )
    written.save()
    h5ad.unlink()
    return folder
