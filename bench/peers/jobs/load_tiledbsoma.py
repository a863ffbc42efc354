"""TileDB-SOMA-ML on an experiment ingested from the plates."""

import tiledbsoma
import torch
from protocol import Job, Loader, csr_tensor, run_loader
from tiledbsoma_ml import ExperimentDataset, experiment_dataloader


def open_loader(job: Job) -> Loader:
    settings = job.settings
    experiment = tiledbsoma.Experiment.open(job.store)
    query = experiment.axis_query(measurement_name="RNA")
    dataset = ExperimentDataset(
        query,
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

    def minibatches():
        for X, _ in loader:
            yield torch.as_tensor(X) if job.dense else csr_tensor(X)

    return Loader(minibatches, max(1, settings["io_batch_size"] // job.batch_size))


if __name__ == "__main__":
    run_loader(open_loader, ["tiledbsoma", "tiledbsoma-ml", "torch", "numpy"])
