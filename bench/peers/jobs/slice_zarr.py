"""The floor on a shuffled store: slices through zarr, with the codec pipeline of zarrs."""

import zarr
from protocol import Job, Loader, run_loader
from slices import sliced_loader
from storage import open_store


def open_loader(job: Job) -> Loader:
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    return sliced_loader(open_store(job.store), job)


if __name__ == "__main__":
    run_loader(open_loader, ["zarr", "zarrs", "scipy", "torch", "numpy"])
