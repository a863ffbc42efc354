"""annbatch on the datasets of a zarr store on a server, through fsspec in its environment."""

import json
import sys
import time

import anndata
import numpy as np
import zarr
from annbatch import Loader
from read_slices import fsspec_options


def main():
    job = json.loads(sys.stdin.readline())
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    began = time.perf_counter()
    options = fsspec_options(job["options"])
    parts = [
        anndata.AnnData(
            X=anndata.io.sparse_dataset(
                zarr.open_group(
                    zarr.storage.FsspecStore.from_url(url, storage_options=options, read_only=True),
                    mode="r",
                )["X"]
            )
        )
        for url in job["paths"]
    ]
    opening = time.perf_counter() - began
    print(json.dumps({"seconds": opening}), flush=True)  # noqa: T201
    for line in sys.stdin:
        loader = Loader(
            batch_size=64,
            chunk_size=job["block_size"],
            preload_nchunks=4096 // job["block_size"],
            shuffle=True,
            to="torch",
            rng=np.random.default_rng(int(line)),
        )
        loader.add_adatas(parts)
        began, cpu, n_cells = time.perf_counter(), time.process_time(), 0
        for minibatch in loader:
            n_cells += minibatch["X"].shape[0]
            if n_cells % 4096 == 0 and time.perf_counter() - began > job["seconds"]:
                break  # at the end of the preloaded cells
        seconds = time.perf_counter() - began
        answer = {"n_cells": n_cells, "seconds": seconds, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
