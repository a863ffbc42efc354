"""annbatch on a shuffled zarr store, with the codec pipeline that its documentation asks for."""

import functools

import anndata
import numpy as np
import zarr
from annbatch import DatasetCollection
from annbatch import Loader as AnnbatchLoader
from protocol import Job, Loader, run_loader

zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})


def matrix_and_label(group: zarr.Group, label: str) -> anndata.AnnData:
    """Read no column but the label: its documentation warns that all of them cost time."""
    return anndata.AnnData(
        X=anndata.io.sparse_dataset(group["X"]), obs=anndata.io.read_elem(group["obs"])[[label]]
    )


def open_loader(job: Job) -> Loader:
    settings = job.settings
    loader = AnnbatchLoader(
        batch_size=job.batch_size,
        chunk_size=settings["chunk_size"],
        preload_nchunks=settings["preload_nchunks"],
        shuffle=True,
        to="torch",
        rng=np.random.default_rng(job.seed),
    )
    with anndata.settings.override(remove_unused_categories=False):
        loader.use_collection(
            DatasetCollection(job.store),
            load_adata=functools.partial(matrix_and_label, label=job.label),
        )

    def minibatches():
        for minibatch in loader:
            X = minibatch["X"]
            yield X.to_dense() if job.dense else X

    buffer_rows = settings["chunk_size"] * settings["preload_nchunks"]
    return Loader(minibatches, max(1, buffer_rows // job.batch_size))


if __name__ == "__main__":
    run_loader(open_loader, ["annbatch", "zarr", "zarrs", "anndata", "torch", "numpy"])
