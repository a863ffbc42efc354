"""Make annbatch's own shuffled zarr store, with its defaults and the pipeline it asks for."""

import sys

import zarr
from annbatch import DatasetCollection

if __name__ == "__main__":
    target, *plates = sys.argv[1:]
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    DatasetCollection(target).add_adatas(plates, shuffle=True)
