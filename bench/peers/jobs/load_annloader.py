"""AnnLoader over an AnnCollection of backed plates: every cell drawn at random."""

import warnings

import anndata
import numpy as np
import torch
from anndata.experimental import AnnCollection
from protocol import Job, Loader, csr_tensor, run_loader
from scipy.sparse import issparse


def csr_if_sparse(array):
    """Keep what is sparse so; what stands on top of it makes it dense otherwise."""
    return csr_tensor(array) if issparse(array) else array


def open_loader(job: Job) -> Loader:
    warnings.simplefilter("ignore")
    from anndata.experimental import AnnLoader  # noqa: PLC0415 - warns when it is imported

    np.random.seed(job.seed)  # noqa: NPY002 - where AnnLoader's sampler draws from
    torch.manual_seed(job.seed)
    plates = [anndata.read_h5ad(path, backed="r") for path in job.plates]
    collection = AnnCollection(
        plates,
        join_vars="inner",
        harmonize_dtypes=False,
        convert=None if job.dense else {"X": csr_if_sparse},
    )
    loader = AnnLoader(collection, batch_size=job.batch_size, shuffle=True)

    def minibatches():
        for cells in loader:
            _ = cells.obs[job.label]
            yield cells.X

    return Loader(minibatches, 1)


if __name__ == "__main__":
    run_loader(open_loader, ["anndata", "torch", "h5py", "numpy"])
