"""scDataset on an AnnCollection of backed plates, with the callbacks that its documentation names.

Dense minibatches are made in two ways: ``densify="fetch"`` is the library's own transform for
AnnData, which makes a whole fetch dense; otherwise each minibatch is made dense from a sparse
fetch, which takes less memory.
"""

import functools
import warnings

import anndata
import torch
from anndata.experimental import AnnCollection
from protocol import Job, Loader, csr_tensor, run_loader
from scdataset import BlockShuffling, adata_to_mindex, scDataset
from torch.utils.data import DataLoader


def sparse_fetch(cells, label):
    """Read the matrix and the label, and nothing else of the cells."""
    return cells.X, cells.obs[label].to_numpy()


def csr_minibatch(fetched, rows):
    X, labels = fetched
    return csr_tensor(X[rows]), labels[rows]


def dense_minibatch(fetched, rows):
    X, labels = fetched
    return torch.from_numpy(X[rows].toarray()), labels[rows]


def minibatch_of_dense_fetch(fetched, rows, label):
    minibatch = fetched[rows]
    return torch.from_numpy(minibatch["X"]), minibatch[label]


def callbacks(job: Job) -> dict:
    if job.settings.get("densify") == "fetch":
        return {
            "fetch_transform": functools.partial(adata_to_mindex, columns=[job.label]),
            "batch_callback": functools.partial(minibatch_of_dense_fetch, label=job.label),
        }
    return {
        "fetch_transform": functools.partial(sparse_fetch, label=job.label),
        "batch_callback": dense_minibatch if job.dense else csr_minibatch,
    }


def open_loader(job: Job) -> Loader:
    settings = job.settings
    warnings.filterwarnings("ignore", category=UserWarning)
    plates = [anndata.read_h5ad(path, backed="r") for path in job.plates]
    dataset = scDataset(
        AnnCollection(plates, join_vars="inner", harmonize_dtypes=False),
        BlockShuffling(block_size=settings["block_size"]),
        batch_size=job.batch_size,
        fetch_factor=settings["fetch_factor"],
        seed=job.seed,
        **callbacks(job),
    )
    n_workers = settings["num_workers"]
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=n_workers,
        # What its documentation recommends; without workers nothing may be given.
        prefetch_factor=settings["fetch_factor"] + 1 if n_workers else None,
    )

    def minibatches():
        for X, _ in loader:
            yield X

    return Loader(minibatches, settings["fetch_factor"] * max(1, n_workers))


if __name__ == "__main__":
    run_loader(open_loader, ["scdataset", "anndata", "torch", "h5py", "numpy"])
