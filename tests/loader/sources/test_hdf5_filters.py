"""Files that hdf5plugin's filters compress are read in every process, or it is said what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense
from tests.warm import python as warm

from cellfeed import open_collection

ROOT = Path(__file__).parents[3]
COUNTS = np.random.default_rng(0).poisson(0.7, size=(60, 30)).astype(np.float32)
OBS = {"plate": pd.Categorical(["a", "b"] * 30), "number": np.arange(60.0)}
FILTERS = {
    "zstd": hdf5plugin.Zstd(),
    "blosc": hdf5plugin.Blosc(cname="lz4"),
    "lz4": hdf5plugin.LZ4(),
    "blosc2": hdf5plugin.Blosc2(),
    "bitshuffle": hdf5plugin.Bitshuffle(),
}
REMEDY = "which HDF5 only reads with hdf5plugin; install it with `pip install hdf5plugin`"


@pytest.fixture(scope="module")
def whole(write_h5ad):
    """As anndata writes: names, columns and row pointers are compressed too."""
    return write_h5ad(sp.csr_matrix(COUNTS), OBS, compression=hdf5plugin.FILTERS["zstd"])


@pytest.fixture(scope="module")
def filtered(write_h5ad, replace):
    """Return a function that compresses numbers alone, as not all filters can text."""

    def write(name, X, *, obs=True):
        def edit(file):
            parts = ["X"] if X is COUNTS else ["X/indptr", "X/indices", "X/data"]
            for part in parts + ["obs/number", "obs/plate/codes"] * obs:
                values = file[part][:]
                chunks = tuple(min(n, 16) for n in values.shape)
                replace(file, part, values, chunks=chunks, **FILTERS[name])

        return write_h5ad(X, OBS, edit=edit)

    return write


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
def test_installed(filtered, name, kind):
    cells = open_collection(filtered(name, kind(COUNTS)), obs=["plate", "number"])[:]
    assert np.array_equal(dense(cells.X), COUNTS)
    assert cells.obs["number"].tolist() == list(range(60))
    assert cells.obs["plate"].tolist() == [0, 1] * 30


# Whoever runs it has imported hdf5plugin by cellfeed alone, and so has the worker.
SPAWN = """
import json, sys, warnings
from cellfeed import CellDataset, Streaming, open_collection

if __name__ == "__main__":
    for path in sys.argv[1:]:
        collection = open_collection(path, obs=["plate", "number"])
        with warnings.catch_warnings():  # and not in the worker
            warnings.simplefilter("ignore")
            dataset = CellDataset(collection, Streaming(), batch_size=60, dense=True)
        (cells,) = dataset.loader(num_workers=1, multiprocessing_context="spawn")
        order = cells.rows.argsort()
        print(json.dumps([cells.X[order].tolist(), cells.obs["number"][order].tolist()]))
"""


@pytest.mark.process
@pytest.mark.slow
def test_installed_in_spawned_workers(whole, filtered, tmp_path):
    pytest.importorskip("torch")
    (script := tmp_path / "script.py").write_text(SPAWN)
    command = [sys.executable, "-W", "error", script, whole, filtered("lz4", COUNTS)]
    ran = warm.run([*map(str, command)], env=os.environ | {warm.ADDRESS: warm.address()})
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(ran.stdout.splitlines()) == 2
    for line in ran.stdout.splitlines():
        rows, numbers = json.loads(line)
        assert np.array_equal(rows, COUNTS)
        assert numbers == list(range(60))


WITHOUT = """
import json, sys
sys.modules["hdf5plugin"] = None  # as where it is not installed
from cellfeed import CellfeedError, open_collection
from tests.commands import cellfeed

for path in sys.argv[2:]:
    try:
        cells = open_collection(path, obs=["plate", "number"])[:]
        X = getattr(cells.X, "toarray", lambda cells=cells: cells.X)()
        said = [X.tolist(), cells.obs["number"].tolist()]
    except CellfeedError as error:
        said = str(error)
    print(json.dumps(said))
ran = cellfeed("preshuffle", sys.argv[2], sys.argv[1])
print(json.dumps([ran.exit_code, ran.stderr]))
"""


@pytest.mark.process
@pytest.mark.slow
def test_not_installed(whole, filtered, tmp_path):
    """It is named, unless the values are decoded here; by one process that imports all itself."""
    names = ("lz4", "bitshuffle", "blosc2", "zstd")
    needing = [
        whole,
        *(filtered(each, X) for each in names for X in (COUNTS, sp.csr_matrix(COUNTS))),
    ]
    not_needing = [filtered(each, COUNTS, obs=False) for each in ("zstd", "blosc")]
    # What other tests have read of these files may be recorded in their cache.
    env = os.environ | {"CELLFEED_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error", "-c", WITHOUT, tmp_path / "out.zarr"]
    command += [*needing, *not_needing]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]
    *said, of_command = map(json.loads, ran.stdout.splitlines())
    for path, message in zip(needing, said, strict=False):
        assert message.startswith(f"{path}: `")
        assert message.endswith(REMEDY)
    with h5py.File(whole) as file:  # in which hdf5plugin names the filter
        stored = file["X/data"].id.get_create_plist().get_filter(0)[3].decode()
    name, _, _ = stored.partition(";")  # an address may follow
    assert said[0] == f"{whole}: `X` is compressed with {name} (32015), {REMEDY}"
    assert len(said) == len(needing) + 2
    for rows, numbers in said[len(needing) :]:
        assert np.array_equal(rows, COUNTS)
        assert numbers == list(range(60))
    assert of_command[0] == 2
    assert of_command[1].count("\n") == 1
    assert of_command[1].endswith(f"{REMEDY}\n")
