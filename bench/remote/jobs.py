"""Loaders that read epochs from a server on request, each in its own process and environment.

The first line of the input has the settings, each further line the number of an epoch. The first
line of the output says how many seconds opening took, each further line what an epoch cost.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np

FETCH_ROWS = 4096
Sizes = Callable[[int], Iterator[int]]
"""Reads the epoch with a number, and yields how many cells came each time."""


def cellfeed(job: dict) -> Sizes:
    """Open cellfeed; it reads whole epochs."""
    from cellfeed import BlockShuffling, CellDataset, open_collection  # noqa: PLC0415

    options = {"storage_options": job["options"]} if job["options"] else {}
    collection = open_collection(job["paths"], obs=["plate"], **options)
    collection.load_tables()
    dataset = CellDataset(
        collection,
        BlockShuffling(block_size=job["block_size"]),
        batch_size=64,
        fetch_factor=FETCH_ROWS // 64,
        seed=0,
        prefetch=job["prefetch"],
    )

    def sizes(number: int) -> Iterator[int]:
        dataset.set_epoch(number)
        for minibatch in dataset.loader():
            _ = minibatch.obs["plate"]
            yield minibatch.X.shape[0]

    return sizes


def annbatch(job: dict) -> Sizes:
    """Open annbatch on the datasets of a zarr store, through fsspec in its environment."""
    import anndata  # noqa: PLC0415
    import zarr  # noqa: PLC0415
    from annbatch import Loader  # noqa: PLC0415

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    open_url = zarr.storage.FsspecStore.from_url
    stores = [
        open_url(url, storage_options=fsspec_options(job["options"]), read_only=True)
        for url in job["paths"]
    ]
    groups = [zarr.open_group(store, mode="r")["X"] for store in stores]
    parts = [anndata.AnnData(X=anndata.io.sparse_dataset(group)) for group in groups]

    def sizes(number: int) -> Iterator[int]:
        loader = Loader(
            batch_size=64,
            chunk_size=job["block_size"],
            preload_nchunks=FETCH_ROWS // job["block_size"],
            shuffle=True,
            to="torch",
            rng=np.random.default_rng(number),
        )
        loader.add_adatas(parts)
        for minibatch in loader:
            yield minibatch["X"].shape[0]

    return sizes


def h5py(job: dict) -> Sizes:
    """Open the floor on plates: slices by h5py of fsspec files (and s3fs)."""
    import fsspec  # noqa: PLC0415
    import h5py  # noqa: PLC0415

    options = fsspec_options(job["options"])
    files = [fsspec.open(url, "rb", **options).open() for url in job["paths"]]
    return slices(job, [h5py.File(file, "r")["X"] for file in files])


def zarr(job: dict) -> Sizes:
    """Open the floor on a store: slices by zarr-python on obstore."""
    import obstore.store  # noqa: PLC0415
    import zarr  # noqa: PLC0415

    options = {"client_options": {"allow_http": True}} | job["options"]
    stores = [
        zarr.storage.ObjectStore(obstore.store.from_url(url, **options), read_only=True)
        for url in job["paths"]
    ]
    return slices(job, [zarr.open_group(store, mode="r")["X"] for store in stores])


def fsspec_options(options: dict) -> dict:
    """Return options of obstore as s3fs takes them."""
    if not options:
        return {}
    client = {"endpoint_url": options["endpoint"], "region_name": options["region"]}
    keys = {"key": options["access_key_id"], "secret": options["secret_access_key"]}
    return keys | {"client_kwargs": client}


def slices(job: dict, groups: list) -> Sizes:
    """Return what a user writes by hand: random blocks of rows, sorted within each fetch."""
    matrices = [(group["data"], group["indices"], group["indptr"][:]) for group in groups]
    block_size = job["block_size"]
    blocks = np.array(
        [
            (number, row)
            for number, (_, _, indptr) in enumerate(matrices)
            for row in range(0, len(indptr) - 1, block_size)
        ]
    )
    per_fetch = FETCH_ROWS // block_size

    def sizes(number: int) -> Iterator[int]:
        order = np.random.default_rng(number).permutation(len(blocks))
        for begin in range(0, len(blocks), per_fetch):
            for which, row in blocks[np.sort(order[begin : begin + per_fetch])].tolist():
                data, indices, indptr = matrices[which]
                stop = min(row + block_size, len(indptr) - 1)
                first, last = int(indptr[row]), int(indptr[stop])
                _ = data[first:last], indices[first:last]
                yield stop - row

    return sizes


# Each with the number of cells after whose multiples it may stop; cellfeed reads whole epochs.
LOADERS = {
    "cellfeed": (cellfeed, None),
    "annbatch": (annbatch, FETCH_ROWS),
    "h5py": (h5py, 1),
    "zarr": (zarr, 1),
}


def counted(job: dict) -> dict[str, int]:
    """Return cellfeed's requests to servers so far; zeros for local files and other loaders."""
    if job["loader"] != "cellfeed" or not job["paths"][0].startswith(("http", "s3:")):
        return dict.fromkeys(("n_requests", "n_bytes", "n_wanted", "n_repeated"), 0)
    # There is no public way.
    from cellfeed._bytes._remote._scheduler import _schedulers  # noqa: PLC0415

    (scheduler,) = _schedulers.values()
    return asdict(scheduler.counters)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def answer(figures: dict) -> None:
    print(json.dumps(figures), flush=True)  # noqa: T201 - this is how a job answers


def main() -> None:
    job = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    open_loader, may_stop_after = LOADERS[job["loader"]]
    sizes = open_loader(job)
    answer({"seconds": time.perf_counter() - began})
    for line in sys.stdin:
        before, used = counted(job), processor_seconds()
        began, n_cells, first = time.perf_counter(), 0, 0.0
        for size in sizes(int(line)):
            n_cells += size
            seconds = time.perf_counter() - began
            first = first or seconds
            if may_stop_after and n_cells % may_stop_after == 0 and seconds > job["seconds"]:
                break
        seconds, cpu = time.perf_counter() - began, processor_seconds() - used
        after = counted(job)
        answer(
            {name: after[name] - before[name] for name in after}
            | {"n_cells": n_cells, "seconds": seconds, "first": first, "cpu": cpu}
        )


if __name__ == "__main__":
    main()
