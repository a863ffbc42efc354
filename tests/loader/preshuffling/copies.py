"""What every storage is asked for when it is copied."""

import numpy as np

from cellfeed import open_collection, preshuffle


def assert_preshuffled(path, adata, folder, obs=()):
    """Assert that preshuffle takes a path; return what comes of it, and which row each cell was."""
    preshuffle(path, folder / "shuffled.zarr", seed=0)
    shuffled = open_collection(folder / "shuffled.zarr", obs=["source_row", *obs])
    rows = np.asarray(shuffled.obs["source_row"].values).astype(int)
    assert np.array_equal(np.sort(rows), np.arange(adata.n_obs))
    assert np.array_equal(shuffled[:].X.toarray(), adata.X[rows].toarray())
    return shuffled, rows
