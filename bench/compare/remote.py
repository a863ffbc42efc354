"""Cells read over a distance: from servers behind a proxy that adds each of ``--milliseconds``.

The .h5ad plates of ``--data`` are served on loopback by the tests' web server or SeaweedFS (s3),
and a proxy adds a round trip; at 0 ms, too, requests pass it. A process reads an epoch that is not
timed, in which the number of concurrent requests grows, and then one that is. With ``--peers``,
slices of blocks through fsspec + h5py and obstore + zarr-python are compared with cellfeed, on the
plates and on a shuffled zarr store that is written beside them, and annbatch if ``--annbatch``
names a Python that has it; on s3, fsspec needs s3fs: ``--fsspec`` names a Python with it.
"""

import contextlib
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from bench._harness import Case, plates_of, way

FETCH_ROWS = 4096
PROXY, SERVERS = "cores of the proxy", "cores of the server"


def figures(function, opened, stops_after=None, seconds=None):
    """Read two epochs by `function`, and return what the second one cost.

    Parameters
    ----------
    function
        Returns how many cells come each time, in the epoch with a number.
    opened
        When opening began.
    stops_after
        Whether an epoch ends after some seconds, at a multiple of so many cells.
    """
    opening, first = time.perf_counter() - opened, {}
    for number in range(2):
        used, of_others = time.process_time(), cpu_of_others()
        began, n_cells, waited = time.perf_counter(), 0, 0.0
        for size in function(number):
            n_cells += size
            took = time.perf_counter() - began
            waited = waited or took
            if stops_after and n_cells % stops_after == 0 and took > seconds:
                break
        took, cpu = time.perf_counter() - began, time.process_time() - used
        found = {"cells/s": n_cells / took, "us of processor per cell": 1e6 * cpu / n_cells,
                 "cores of the client": cpu / took, "s to the first minibatch": waited}  # fmt: skip
        found |= {name: (now - of_others[name]) / took for name, now in cpu_of_others().items()}
        first = first or {"cells/s of the first epoch": found["cells/s"], "s to open": opening}
    return found | first


def cpu_of_others():
    """Return the seconds that servers and proxies on this machine have used so far."""
    found = Counter({PROXY: 0.0, SERVERS: 0.0})
    with contextlib.suppress(ImportError):  # in the environment of another loader
        import psutil

        for process in psutil.process_iter(["cmdline", "name"]):
            command = " ".join(process.info["cmdline"] or ())
            is_server = "tests.servers.serving" in command or process.info["name"] == "weed"
            if is_server or "tests.servers.proxy" in command:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[SERVERS if is_server else PROXY] += sum(process.cpu_times()[:2])
    return dict(found)


def cellfeed(seed, urls, options, block, prefetch=None):
    from cellfeed import BlockShuffling, CellDataset, ReadOptions, open_collection

    opened = time.perf_counter()
    stored = {"storage_options": options} if options else {}
    collection = open_collection(urls, obs=["plate"], **stored)
    collection.load_tables()
    strategy, factor = BlockShuffling(block), FETCH_ROWS // 64
    dataset = CellDataset(
        collection, strategy, 64, factor, seed=seed, read_options=ReadOptions(prefetch=prefetch)
    )

    def sizes(number):
        dataset.set_epoch(number)
        for minibatch in dataset.loader():
            _ = minibatch.obs["plate"]
            yield len(minibatch)

    return figures(sizes, opened)


def annbatch(seed, urls, options, block, seconds):
    """Read the datasets of a zarr store through fsspec."""
    import anndata
    import zarr
    from annbatch import Loader

    opened = time.perf_counter()
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    stores = [
        zarr.storage.FsspecStore.from_url(
            url, storage_options=fsspec_options(options), read_only=True
        )
        for url in urls
    ]
    groups = [zarr.open_group(store, mode="r")["X"] for store in stores]
    parts = [anndata.AnnData(X=anndata.io.sparse_dataset(group)) for group in groups]

    def sizes(number):
        loader = Loader(
            batch_size=64, chunk_size=block, preload_nchunks=FETCH_ROWS // block, shuffle=True,
            to="torch", rng=np.random.default_rng([seed, number]),
        )  # fmt: skip
        loader.add_adatas(parts)
        for minibatch in loader:
            yield minibatch["X"].shape[0]

    return figures(sizes, opened, FETCH_ROWS, seconds)


def slices_by_h5py(seed, urls, options, block, seconds):
    import fsspec
    import h5py

    opened, given = time.perf_counter(), fsspec_options(options)
    files = [fsspec.open(url, "rb", **given).open() for url in urls]
    groups = [h5py.File(file, "r")["X"] for file in files]
    return figures(slices(seed, groups, block), opened, 1, seconds)


def slices_by_zarr(seed, urls, options, block, seconds):
    import obstore.store
    import zarr

    opened, given = time.perf_counter(), {"client_options": {"allow_http": True}} | options
    stores = [
        zarr.storage.ObjectStore(obstore.store.from_url(url, **given), read_only=True)
        for url in urls
    ]
    groups = [zarr.open_group(store, mode="r")["X"] for store in stores]
    return figures(slices(seed, groups, block), opened, 1, seconds)


def fsspec_options(options):
    """Return options of obstore as s3fs takes them."""
    if not options:
        return {}
    client = {"endpoint_url": options["endpoint"], "region_name": options["region"]}
    keys = {"key": options["access_key_id"], "secret": options["secret_access_key"]}
    return keys | {"client_kwargs": client}


def slices(seed, groups, block_size):
    """Return what a user writes by hand: random blocks of rows, sorted within each fetch."""
    matrices = [(group["data"], group["indices"], group["indptr"][:]) for group in groups]
    blocks = np.array([
        (number, row) for number, (_, _, indptr) in enumerate(matrices)
        for row in range(0, len(indptr) - 1, block_size)
    ])  # fmt: skip
    per_fetch = FETCH_ROWS // block_size

    def sizes(number):
        order = np.random.default_rng([seed, number]).permutation(len(blocks))
        for begin in range(0, len(blocks), per_fetch):
            for which, row in blocks[np.sort(order[begin : begin + per_fetch])].tolist():
                data, indices, indptr = matrices[which]
                stop = min(row + block_size, len(indptr) - 1)
                first, last = int(indptr[row]), int(indptr[stop])
                _ = data[first:last], indices[first:last]
                yield stop - row

    return sizes


@contextmanager
def served(kind, folder, names):
    """Serve files of a folder from another process; yield its URL, that of the files, options."""
    from tests.servers.s3 import S3Server
    from tests.servers.web import WebServer

    if kind == "web":
        with WebServer.in_process(folder) as url:
            yield url, None, {}
        return
    with TemporaryDirectory() as own, S3Server(Path(own)) as server:
        for name in names:
            server.put(folder / name, name)
        yield server.url, f"s3://{server.bucket}", server.options


def cases(options):
    from tests.servers.proxy import DelayingProxy

    from cellfeed import preshuffle

    files, store, parts = plates_of(options), options.data / "shuffled.zarr", []
    if options.peers:
        if not store.exists():
            preshuffle(files, store, seed=0, codec="annbatch")  # which annbatch reads too
        parts = sorted(store.glob("dataset_*"))
    served_files = [*files, *(file for file in store.rglob("*") if file.is_file())]
    names = [str(file.relative_to(options.data)) for file in served_files]
    for kind in options.servers:
        with ExitStack() as stack:
            url, base, stored = stack.enter_context(served(kind, options.data, names))
            reached = {}
            for each in options.milliseconds:
                proxy = stack.enter_context(DelayingProxy(url, each / 1000))
                own = stored | {"endpoint": proxy.url} if stored else {}
                reached[f"{each:g} ms"] = base or proxy.url, own
            for block in () if options.peers else options.blocks:
                local = {"urls": list(map(str, files)), "options": {}}
                ways = {"local": way(cellfeed, block=block, **local)}
                for name, (where, own) in reached.items():
                    given = {"urls": [f"{where}/{each.name}" for each in files], "options": own}
                    ways[name] = way(cellfeed, block=block, **given)
                if block == options.blocks[0]:  # at the longest distance
                    given["block"] = block
                    ways |= {f"{name}, prefetch {n}": way(cellfeed, prefetch=n, **given)
                             for n in options.prefetches}  # fmt: skip
                yield Case(ways, f"{kind}, block {block}", list(ways)[1:2])
            for name, (where, own) in reached.items() if options.peers else ():
                yield from beside_peers(options, f"{kind}, {name}", where, own, files, parts)


def beside_peers(options, title, where, own, files, parts):
    """Yield a case for the plates, and one for the datasets of the store."""
    for storage, paths, others in (
        (".h5ad", files, {"fsspec + h5py": (slices_by_h5py, options.fsspec)}),
        ("zarr", parts, {"obstore + zarr-python": (slices_by_zarr, "")}
         | ({"annbatch": (annbatch, options.annbatch)} if options.annbatch else {})),
    ):  # fmt: skip
        urls = [f"{where}/{path.relative_to(options.data)}" for path in paths]
        given = {"urls": urls, "options": own, "block": options.blocks[0]}
        ways = {"cellfeed": way(cellfeed, **given)}
        for name, (function, python) in others.items():
            interpreter = python or sys.executable
            ways[name] = way(function, python=interpreter, seconds=options.limit, **given)
        yield Case(ways, f"{title}, {storage}")


OPTIONS = {
    "cells": 28_000,
    "rounds": 5,
    "servers": ["web", "s3"],
    "milliseconds": [0.0, 10.0, 50.0, 150.0],
    "blocks": [16, 64],
    "prefetches": [1, 2, 4, 16],
    "peers": False,
    "limit": 5.0,
    "annbatch": "",
    "fsspec": "",
    "n_ratios": 1,
}
