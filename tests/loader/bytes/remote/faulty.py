"""Plates behind a web server that fails, and three ways to read them."""

import warnings
from datetime import timedelta

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from anndata.io import write_elem

from cellfeed import BlockShuffling, CellDataset, open_collection

__all__ = ["KINDS", "N_CELLS", "PATIENT", "SHARDED", "VALUES", "WAYS", "quick", "read", "served"]

N_CELLS, N_GENES = 600, 30
KINDS = ["p.h5ad", "p.zarr"]
SHARDED = "sharded.zarr"
WAYS = ["opening", "rows", "iteration"]
# For servers of tests, on a machine that may be busy.
PATIENT = {"client_options": {"read_timeout": "10m", "connect_timeout": "10m", "timeout": "10m"}}
VALUES = (
    np.random.default_rng(1).poisson(0.5, (N_CELLS, N_GENES)).astype(np.float32)
)  # the oracle of every test


def in_pairs(faults):
    """Return each fault with each kind and each way, and each kind with each way: half of all."""
    return [
        (KINDS[(number + k + 1) % 2], way, *fault)
        for number, fault in enumerate(faults)
        for k, way in enumerate(WAYS)
    ]


def served(folder):
    """Write the same cells as h5ad and as zarr, in chunks and in shards."""
    adata = anndata.AnnData(
        sp.csr_matrix(VALUES),
        obs=pd.DataFrame(
            {"plate": pd.Categorical(["p"] * N_CELLS)}, index=[str(k) for k in range(N_CELLS)]
        ),
    )
    adata.write_h5ad(folder / "p.h5ad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that version 3 will be the default
        adata.write_zarr(folder / "p.zarr")
        with anndata.settings.override(zarr_write_format=3):
            adata.write_zarr(folder / SHARDED)
            group = zarr.open_group(folder / SHARDED, use_consolidated=False)
            shards = {"chunks": (500,), "shards": (1000,)}
            write_elem(group, "X", adata.X, dataset_kwargs=shards)
            zarr.consolidate_metadata(folder / SHARDED)
    return folder


def quick(n_retries=2, *, seconds=60.0, **options):
    """Return storage options with short waits."""
    return {
        "client_options": {"read_timeout": f"{seconds}s", "connect_timeout": f"{seconds}s"},
        "retry_config": {
            "max_retries": n_retries,
            "backoff": {"init_backoff": timedelta(milliseconds=1)},
        },
    } | options


def read(server, kind, way, answer, options):
    """Read from a server that answers so from opening on, or once it is opened."""
    if way == "opening":
        server.answer = answer
    there = open_collection(f"{server.url}/{kind}", obs=["plate"], storage_options=options)
    server.answer = answer
    server.requests.clear() if way != "opening" else None
    if way == "iteration":
        dataset = CellDataset(there, BlockShuffling(4), batch_size=64, seed=2, as_torch=False)
        n_cells = 0
        for each in dataset:
            np.testing.assert_array_equal(each.X.toarray(), VALUES[each.rows])
            n_cells += len(each.rows)
        assert n_cells == N_CELLS
    else:
        rows = [599, 3, 70]
        np.testing.assert_array_equal(there[rows].X.toarray(), VALUES[rows])
