"""cellfeed, on ``.h5ad`` files, a zarr store or an archive of cellstream."""

from pathlib import Path

from protocol import Job, Loader, run_loader

from cellfeed import BlockShuffling, CellDataset, open_collection


def open_loader(job: Job) -> Loader:
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
        num_threads=settings.get("num_threads"),
    )

    n_workers = settings.get("num_workers", 0)

    def minibatches():
        for minibatch in dataset.loader(num_workers=n_workers):
            _ = minibatch.obs[job.label]
            yield minibatch.X

    return Loader(minibatches, settings["fetch_factor"] * max(1, n_workers))


if __name__ == "__main__":
    run_loader(open_loader, ["cellfeed", "torch", "h5py", "numpy"])
