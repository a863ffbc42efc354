"""Files that hdf5plugin's filters compress are read in every process, or it is said what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hdf5plugin
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.warm import python as warm

COUNTS = np.random.default_rng(0).poisson(0.7, size=(60, 30)).astype(np.float32)
OBS = {"plate": pd.Categorical(["a", "b"] * 30), "number": np.arange(60.0)}

# Whoever runs it has imported hdf5plugin by cellfeed alone, and so have the workers it starts.
LOAD = """
import json
import sys
import warnings

from cellfeed import CellDataset, CellfeedError, Streaming, open_collection


def rows(path, workers):
    collection = open_collection(path, obs=["plate", "number"])
    with warnings.catch_warnings(record=True) as warned:  # and nowhere else, such as in a worker
        warnings.simplefilter("always")
        dataset = CellDataset(collection, Streaming(), batch_size=60, fetch_factor=1)
    assert [str(each.message) for each in warned] == list(filter(None, [collection.slow_reading()]))
    (minibatch,) = dataset.loader(**workers)
    X = minibatch.X.to_dense() if minibatch.X.is_sparse_csr else minibatch.X
    order = minibatch.rows.argsort()
    return [X[order].tolist(), minibatch.obs["number"][order].tolist()]


def main():
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    for path in sys.argv[2:]:
        try:
            said = rows(path, spawned if sys.argv[1] == "spawn" else {})
        except CellfeedError as error:
            said = str(error)
        print(json.dumps(said))


if __name__ == "__main__":
    main()
"""
# As where it is not installed.
WITHOUT = "import sys; sys.modules['hdf5plugin'] = None\n"

FILTERS = {
    "zstd": hdf5plugin.Zstd(),
    "blosc": hdf5plugin.Blosc(cname="lz4"),
    "lz4": hdf5plugin.LZ4(),
    "blosc2": hdf5plugin.Blosc2(),
    "bitshuffle": hdf5plugin.Bitshuffle(),
}
REMEDY = "which HDF5 only reads with hdf5plugin; install it with `pip install hdf5plugin`"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return warm.run(command, env=os.environ | {warm.ADDRESS: warm.address()}, timeout=1800)


def run_without(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python itself: nothing may have imported cellfeed before."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that reads files in a process of its own: rows, or what is said."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("load")

    def load(paths, *, method="here", run=run, before=""):
        script = folder / "load.py"
        script.write_text(before + LOAD)
        done = run("-W", "error", script, method, *paths)
        assert done.returncode == 0, done.stderr[-3000:]
        said = [json.loads(line) for line in done.stdout.splitlines()]
        return dict(zip(paths, said, strict=True))

    return load


@pytest.fixture(scope="module")
def whole(write_h5ad):
    """As anndata writes: names, columns and row pointers are compressed too."""
    options = {"compression": hdf5plugin.FILTERS["zstd"]}
    return write_h5ad(sp.csr_matrix(COUNTS), OBS, **options)


@pytest.fixture(scope="module")
def filtered(write_h5ad, replace):
    """Files of each filter and layout; numbers alone are compressed, as not all can text."""

    def write(name, X, numbers):
        def edit(file):
            for part in ["X"] if X is COUNTS else ["X/indptr", "X/indices", "X/data"]:
                compress(file, part)
            for part in numbers:
                compress(file, part)

        def compress(file, part):
            values = file[part][:]
            chunks = tuple(min(n, 16) for n in values.shape)
            replace(file, part, values, chunks=chunks, **FILTERS[name])

        return write_h5ad(X, OBS, edit=edit)

    def write_all(names, *, obs=True):
        numbers = ["obs/number", "obs/plate/codes"] if obs else []
        csr = [write(name, sp.csr_matrix(COUNTS), numbers) for name in names]
        return csr, [write(name, COUNTS, numbers) for name in names]

    return write_all


def check_rows(said) -> None:
    for path, rows_and_numbers in said.items():
        assert not isinstance(rows_and_numbers, str), (path, rows_and_numbers)
        rows, numbers = rows_and_numbers
        assert np.array_equal(rows, COUNTS)
        assert numbers == list(range(60))


class TestInstalled:
    def test_files_are_read(self, whole, filtered, load):
        csr, dense = filtered(FILTERS)
        check_rows(load([whole, *csr, *dense]))

    def test_files_are_read_in_spawned_workers(self, whole, filtered, load):
        (slow,), _ = filtered(["lz4"])
        check_rows(load([whole, slow], method="spawn"))

    def test_the_commands_read_them(self, whole, tmp_path):
        arguments = [whole, "--label", "plate", "--output", tmp_path, "--budget", "30"]
        arguments += ["--block-sizes", "4", "--fetch-factors", "1", "--workers", "0"]
        arguments += ["--batch-size", "8", "--entropy-floor", "0"]
        for tool, *given in (
            ("autotune", *arguments),
            ("cellfeed", "preshuffle", whole, tmp_path / "out.zarr"),
        ):
            done = run(Path(sys.executable).with_name(tool), *given)
            assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def said_without(whole, filtered, load, tmp_path_factory):
    """What is said of files that need it, and what is read of others, by one process."""
    csr, dense = filtered(["lz4", "bitshuffle", "blosc2", "zstd"])
    _, decoded_here = filtered(["zstd", "blosc"], obs=False)
    with pytest.MonkeyPatch.context() as patch:
        # What other tests have read of these files may be recorded in theirs.
        patch.setenv("CELLFEED_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        said = load([whole, *csr, *dense, *decoded_here], run=run_without, before=WITHOUT)
    read = {path: said.pop(path) for path in decoded_here}
    return said, read


class TestNotInstalled:
    def test_it_is_named(self, whole, said_without):
        for path, message in said_without[0].items():
            assert isinstance(message, str), path
            assert message.startswith(f"{path}: `")
            assert message.endswith(REMEDY)
        said = f"{whole}: `X` is compressed with HDF5 zstd filter (32015), {REMEDY}"
        assert said_without[0][whole] == said

    def test_values_that_are_decoded_here_do_not_need_it(self, said_without):
        assert len(said_without[1]) == 2
        check_rows(said_without[1])

    def test_a_command_says_it_in_one_line(self, whole, tmp_path):
        script = tmp_path / "command.py"
        script.write_text(WITHOUT + "from cellfeed._cli import main; main()")
        done = run_without(script, "preshuffle", whole, tmp_path / "out.zarr")
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert done.stderr.endswith(f"{REMEDY}\n")
