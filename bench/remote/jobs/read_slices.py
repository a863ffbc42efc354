"""What a user writes by hand: rows of random blocks, sliced from files or arrays on a server.

Uses h5py on fsspec files (and s3fs), or zarr-python on obstore. Reads an epoch for some seconds.
"""

import json
import sys
import time

import numpy as np

FETCH_ROWS = 4096


def fsspec_options(options):
    """Return options of obstore as s3fs takes them."""
    if not options:
        return {}
    client = {"endpoint_url": options["endpoint"], "region_name": options["region"]}
    keys = {"key": options["access_key_id"], "secret": options["secret_access_key"]}
    return keys | {"client_kwargs": client}


def opened(job):
    """Return data, indices and indptr of each matrix."""
    if job["kind"] == "h5py":
        import fsspec  # noqa: PLC0415
        import h5py  # noqa: PLC0415

        options = fsspec_options(job["options"])
        files = [fsspec.open(url, "rb", **options).open() for url in job["paths"]]
        groups = [h5py.File(file, "r")["X"] for file in files]
    else:
        import obstore.store  # noqa: PLC0415
        import zarr  # noqa: PLC0415

        groups = []
        for url in job["paths"]:
            options = {"client_options": {"allow_http": True}} | job["options"]
            store = obstore.store.from_url(url, **options)
            groups.append(
                zarr.open_group(zarr.storage.ObjectStore(store, read_only=True), mode="r")["X"]
            )
    return [(group["data"], group["indices"], group["indptr"][:]) for group in groups]


def blocks_of(matrices, block_size, random):
    """Yield the blocks of an epoch, sorted within each fetch."""
    blocks = np.array(
        [
            (number, row)
            for number, (_, _, indptr) in enumerate(matrices)
            for row in range(0, len(indptr) - 1, block_size)
        ]
    )
    order = random.permutation(len(blocks))
    for begin in range(0, len(blocks), FETCH_ROWS // block_size):
        yield from blocks[np.sort(order[begin : begin + FETCH_ROWS // block_size])].tolist()


def main():
    job = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    matrices = opened(job)
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)  # noqa: T201
    for line in sys.stdin:
        random = np.random.default_rng(int(line))
        began, cpu, n_cells = time.perf_counter(), time.process_time(), 0
        for number, row in blocks_of(matrices, job["block_size"], random):
            data, indices, indptr = matrices[number]
            stop = min(row + job["block_size"], len(indptr) - 1)
            first, last = int(indptr[row]), int(indptr[stop])
            _ = data[first:last], indices[first:last]
            n_cells += stop - row
            if time.perf_counter() - began > job["seconds"]:
                break
        seconds = time.perf_counter() - began
        answer = {"n_cells": n_cells, "seconds": seconds, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
