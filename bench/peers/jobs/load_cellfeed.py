"""cellfeed, on ``.h5ad`` files or a zarr store."""

from protocol import Job, Loader, run_loader

from cellfeed import BlockShuffling, CellDataset, open_collection


def open_loader(job: Job) -> Loader:
    settings = job.settings
    collection = open_collection(job.store, obs=[job.label])
    dataset = CellDataset(
        collection,
        BlockShuffling(block_size=settings["block_size"]),
        batch_size=job.batch_size,
        fetch_factor=settings["fetch_factor"],
        seed=job.seed,
        dense=job.dense,
    )

    def minibatches():
        for minibatch in dataset.loader():
            _ = minibatch.obs[job.label]
            yield minibatch.X

    return Loader(minibatches, settings["fetch_factor"])


if __name__ == "__main__":
    run_loader(open_loader, ["cellfeed", "torch", "h5py", "numpy"])
