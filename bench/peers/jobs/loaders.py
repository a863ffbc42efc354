"""Every loader, opened as its documentation says: each runs in its peer's own environment.

A function imports what only its environment has. What they import and open is not timed.
"""

import functools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from protocol import Job, Loader, csr_tensor, read_job, run_loader
from storage import open_plates, open_store, sliced

ZARRS = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}


def cellfeed(job: Job) -> Loader:
    """Open cellfeed on ``.h5ad`` files, a zarr store or an archive of cellstream."""
    from cellfeed import BlockShuffling, CellDataset, ReadOptions, open_collection  # noqa: PLC0415

    settings = job.settings
    archive = Path(job.store) / "cells.csad"
    collection = open_collection(archive if archive.exists() else job.store, obs=[job.label])
    dataset = CellDataset(
        collection,
        BlockShuffling(block_size=settings["block_size"], align=settings.get("align")),
        batch_size=job.batch_size,
        fetch_factor=settings["fetch_factor"],
        seed=job.seed,
        dense=job.dense,
        read_options=ReadOptions(num_threads=settings.get("num_threads")),
    )
    n_workers = settings.get("num_workers", 0)

    def minibatches() -> Iterator[torch.Tensor]:
        for minibatch in dataset.loader(num_workers=n_workers):
            _ = minibatch.obs[job.label]
            yield minibatch.X

    return Loader(minibatches, settings["fetch_factor"] * max(1, n_workers))


def cellstream(job: Job) -> Loader:
    """Open cellstream: every cell of its archive once, at random, by its own `gather_rows`."""
    import cellstream  # noqa: PLC0415

    store = cellstream.open(Path(job.store) / "cells.csad")
    labels = store.obs[job.label].to_numpy()
    rng = np.random.default_rng(job.seed)
    n_threads = len(os.sched_getaffinity(0))

    def minibatches() -> Iterator[torch.Tensor]:
        order = rng.permutation(store.n_obs)
        for start in range(0, store.n_obs, job.fetch_rows):
            # Sorted, which is its fastest; what is fetched at once is shuffled once more.
            rows = np.sort(order[start : start + job.fetch_rows])
            cells = store.gather_rows(rows, n_threads=n_threads)
            if len(rows) <= job.batch_size:
                _ = labels[rows]
                yield csr_tensor(cells)
                continue
            places = rng.permutation(len(rows))
            for first in range(0, len(rows), job.batch_size):
                chosen = places[first : first + job.batch_size]
                _ = labels[rows[chosen]]
                yield csr_tensor(cells[chosen])

    return Loader(minibatches, job.settings["fetch_factor"])


def backed_plates(job: Job, **options):
    """Return an AnnCollection of the plates, which are read on access."""
    import anndata  # noqa: PLC0415
    from anndata.experimental import AnnCollection  # noqa: PLC0415

    plates = [anndata.read_h5ad(path, backed="r") for path in job.plates]
    return AnnCollection(plates, join_vars="inner", harmonize_dtypes=False, **options)


def scdataset(job: Job) -> Loader:
    """Open scDataset on backed plates, with the callbacks that its documentation names.

    Dense minibatches are made in two ways: ``densify="fetch"`` is the library's own transform for
    AnnData, which makes a whole fetch dense; otherwise each minibatch is made dense from a sparse
    fetch, which takes less memory.
    """
    from scdataset import BlockShuffling, adata_to_mindex, scDataset  # noqa: PLC0415

    settings = job.settings
    warnings.filterwarnings("ignore", category=UserWarning)
    if settings.get("densify") == "fetch":
        fetch = functools.partial(adata_to_mindex, columns=[job.label])
        batch = functools.partial(minibatch_of_dense_fetch, label=job.label)
    else:
        fetch = functools.partial(sparse_fetch, label=job.label)
        batch = dense_minibatch if job.dense else csr_minibatch
    dataset = scDataset(
        backed_plates(job),
        BlockShuffling(block_size=settings["block_size"]),
        batch_size=job.batch_size,
        fetch_factor=settings["fetch_factor"],
        seed=job.seed,
        fetch_transform=fetch,
        batch_callback=batch,
    )
    n_workers = settings["num_workers"]
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=n_workers,
        # What its documentation recommends; without workers nothing may be given.
        prefetch_factor=settings["fetch_factor"] + 1 if n_workers else None,
    )

    def minibatches() -> Iterator[torch.Tensor]:
        for X, _ in loader:
            yield X

    return Loader(minibatches, settings["fetch_factor"] * max(1, n_workers))


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


def annloader(job: Job) -> Loader:
    """Open AnnLoader on backed plates: every cell drawn at random."""
    warnings.simplefilter("ignore")
    from anndata.experimental import AnnLoader  # noqa: PLC0415 - warns when it is imported

    np.random.seed(job.seed)  # noqa: NPY002 - where AnnLoader's sampler draws from
    torch.manual_seed(job.seed)
    collection = backed_plates(job, convert=None if job.dense else {"X": csr_if_sparse})
    loader = AnnLoader(collection, batch_size=job.batch_size, shuffle=True)

    def minibatches() -> Iterator[torch.Tensor]:
        for cells in loader:
            _ = cells.obs[job.label]
            yield cells.X

    return Loader(minibatches, 1)


def csr_if_sparse(array):
    """Keep what is sparse so; what stands on top of it makes it dense otherwise."""
    from scipy.sparse import issparse  # noqa: PLC0415

    return csr_tensor(array) if issparse(array) else array


def annbatch(job: Job) -> Loader:
    """Open annbatch on a shuffled store, with the pipeline that its documentation asks for."""
    import annbatch  # noqa: PLC0415
    import anndata  # noqa: PLC0415
    import zarr  # noqa: PLC0415

    zarr.config.set(ZARRS)
    settings = job.settings
    loader = annbatch.Loader(
        batch_size=job.batch_size,
        chunk_size=settings["chunk_size"],
        preload_nchunks=settings["preload_nchunks"],
        shuffle=True,
        to="torch",
        rng=np.random.default_rng(job.seed),
    )

    def matrix_and_label(group: zarr.Group) -> anndata.AnnData:
        # No column but the label: its documentation warns that all of them cost time.
        obs = anndata.io.read_elem(group["obs"])[[job.label]]
        return anndata.AnnData(X=anndata.io.sparse_dataset(group["X"]), obs=obs)

    with anndata.settings.override(remove_unused_categories=False):
        collection = annbatch.DatasetCollection(job.store)
        loader.use_collection(collection, load_adata=matrix_and_label)

    def minibatches() -> Iterator[torch.Tensor]:
        for minibatch in loader:
            X = minibatch["X"]
            yield X.to_dense() if job.dense else X

    buffer_rows = settings["chunk_size"] * settings["preload_nchunks"]
    return Loader(minibatches, max(1, buffer_rows // job.batch_size))


def tiledbsoma(job: Job) -> Loader:
    """Open TileDB-SOMA-ML on an experiment ingested from the plates."""
    import tiledbsoma  # noqa: PLC0415
    from tiledbsoma_ml import ExperimentDataset, experiment_dataloader  # noqa: PLC0415

    settings = job.settings
    dataset = ExperimentDataset(
        tiledbsoma.Experiment.open(job.store).axis_query(measurement_name="RNA"),
        layer_name="data",
        obs_column_names=[job.label],
        batch_size=job.batch_size,
        io_batch_size=settings["io_batch_size"],
        shuffle_chunk_size=settings["shuffle_chunk_size"],
        shuffle=True,
        seed=job.seed,
        return_sparse_X=not job.dense,
    )
    loader = experiment_dataloader(dataset)

    def minibatches() -> Iterator[torch.Tensor]:
        for X, _ in loader:
            yield torch.as_tensor(X) if job.dense else csr_tensor(X)

    return Loader(minibatches, max(1, settings["io_batch_size"] // job.batch_size))


def h5py(job: Job) -> Loader:
    """Open the floor on plates: slices through h5py."""
    return sliced(open_plates(job.plates), job)


def zarr(job: Job) -> Loader:
    """Open the floor on a shuffled store: slices through zarr, with the pipeline of zarrs."""
    import zarr  # noqa: PLC0415

    zarr.config.set(ZARRS)
    return sliced(open_store(job.store), job)


# Each with the packages whose versions are reported.
LOADERS = {
    "cellfeed": (cellfeed, ["cellfeed", "torch", "h5py", "numpy"]),
    "cellstream": (cellstream, ["cellstream", "torch", "numpy"]),
    "scdataset": (scdataset, ["scdataset", "anndata", "torch", "h5py", "numpy"]),
    "annloader": (annloader, ["anndata", "torch", "h5py", "numpy"]),
    "annbatch": (annbatch, ["annbatch", "zarr", "zarrs", "anndata", "torch", "numpy"]),
    "tiledbsoma": (tiledbsoma, ["tiledbsoma", "tiledbsoma-ml", "torch", "numpy"]),
    "h5py": (h5py, ["h5py", "scipy", "torch", "numpy"]),
    "zarr": (zarr, ["zarr", "zarrs", "scipy", "torch", "numpy"]),
}

if __name__ == "__main__":
    job = read_job()
    run_loader(job, *LOADERS[job.peer])
