"""`preshuffle` that is killed or stopped, on Dask, and read by annbatch."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
import zarr
from tests import commands
from tests.warm import python as warm

import cellfeed._convert._preshuffle._part as parts
from cellfeed import ParameterError, open_collection, preshuffle

ANNBATCH = Path(__file__).parents[3] / ".peers" / "annbatch" / "bin" / "python"
N_CELLS, MEMORY, N_PARTS = 3_000, 480_000, 6


@pytest.fixture(scope="module")
def plates(write_h5ad) -> list[Path]:
    rng = np.random.default_rng(0)
    counts = [rng.poisson(0.3, (N_CELLS // 3, 200)).astype(np.float32) for _ in range(3)]
    return [write_h5ad(sp.csr_matrix(X), compression="gzip") for X in counts]


@pytest.fixture(scope="module")
def uninterrupted(plates, new_folder):
    store = new_folder() / "uninterrupted.zarr"
    done = preshuffle(plates, store, memory=MEMORY)
    assert done.n_parts == N_PARTS
    return store


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.zarr"


def content(store: Path) -> dict[str, str]:
    """All metadata, and the values of all arrays; in a shard, chunks lie in any order."""
    found = {}
    for path in store.rglob("zarr.json"):
        text = path.read_text()
        if json.loads(text)["node_type"] == "array":
            array: Any = zarr.open_array(path.parent, mode="r")
            text += repr(array[...].tolist())
        found[str(path.relative_to(store))] = text
    return found


def command(plates: list[Path], out: Path, start: str = "") -> list[str]:
    python = [sys.executable, "-c", start or _START, "preshuffle"]
    return [*python, *map(str, plates), str(out), "--memory", str(MEMORY)]


# What is started in the background ignores interrupts, and so would its children.
_START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from cellfeed._cli import main
main()
"""

# In the middle of the second part it waits for what is to come.
_START_THAT_WAITS = (
    """
import time
from pathlib import Path
import cellfeed._convert._preshuffle._preshuffle as preshuffle

write_part = preshuffle.write_part

def write_and_wait(folder, job, inputs, number, tell):
    def tell_and_wait(share):
        tell(share)
        if number > 0:
            Path(f"{folder.path}.waits").touch()
            time.sleep(600)
    return write_part(folder, job, inputs, number, tell_and_wait)

preshuffle.write_part = write_and_wait
"""
    + _START
)


def wait_for_parts(out: Path, n: int, pattern: str = "dataset_*", seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while len(list(out.glob(pattern))) < n:
        assert time.monotonic() < deadline, f"{out} has no {n} {pattern} after {seconds} s"
        time.sleep(0.005)


@contextmanager
def running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = warm.FinalizedPopen(
        arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# Killed and stopped


def test_killed_and_resumed_is_the_same(plates, out, uninterrupted):
    with running(command(plates, out)) as process:
        wait_for_parts(out, 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    n_done = len(list(out.glob("dataset_*")))
    assert not (out / "zarr.json").exists()
    done = preshuffle(plates, out, memory=MEMORY)
    assert done.n_parts_written == done.n_parts - n_done > 0
    assert content(out) == content(uninterrupted)


def test_ctrl_c_says_how_to_go_on(plates, out):
    with running(command(plates, out, start=_START_THAT_WAITS)) as process:
        wait_for_parts(out.parent, 1, f"{out.name}.waits")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=600)
    assert (process.returncode, stdout) == (130, "")
    assert (
        stderr.strip()
        == "Stopped; run the same command again to resume after the last complete part."
    )
    assert not list((out / ".cellfeed").glob("part-*"))


def test_what_cannot_be_written_is_one_line(plates, out, uninterrupted):
    arguments = ["preshuffle", *map(str, plates), str(out), "--memory", str(MEMORY)]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
    try:
        result = commands.cellfeed(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: File too large: `{out}")
    assert result.stderr.count("\n") == 1
    preshuffle(plates, out, memory=MEMORY)
    assert content(out) == content(uninterrupted)


# Dask


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", module, *arguments]


@contextmanager
def cluster(n_workers: int, folder: Path) -> Iterator[tuple[str, list[psutil.Popen]]]:
    """Start a scheduler and workers on loopback, and stop them."""
    contact = folder / "scheduler.json"
    quiet: dict[str, Any] = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "cwd": folder,
    }
    shared = ["--scheduler-file", str(contact), "--no-dashboard"]
    scheduler = ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    worker = [
        "distributed.cli.dask_worker",
        "--host",
        "127.0.0.1",
        "--no-nanny",
        "--nthreads",
        "1",
        "--death-timeout",
        "300",
    ]
    processes = [psutil.Popen(python(*scheduler, *shared), **quiet)]
    try:
        deadline = time.monotonic() + 600
        while not contact.exists():
            assert time.monotonic() < deadline, "the scheduler did not start"
            time.sleep(0.02)
        processes += [psutil.Popen(python(*worker, *shared), **quiet) for _ in range(n_workers)]
        yield json.loads(contact.read_text())["address"], processes[1:]
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
            process.wait()
        assert not any(process.is_running() for process in processes)


def wait_for_workers(address: str, n: int) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.Client(address, set_as_default=False) as client:
        client.wait_for_workers(n, timeout=600)


def test_dask_survives_the_death_of_a_worker(plates, out, tmp_path, uninterrupted):
    pytest.importorskip("distributed")
    with cluster(2, tmp_path) as (address, workers):
        wait_for_workers(address, 2)

        def kill_one(stage, done, total):
            if stage == "write" and 0 < done < total:
                workers[0].kill()

        done = preshuffle(plates, out, memory=MEMORY, scheduler=address, on_progress=kill_one)
        assert not workers[0].is_running() or workers[0].status() == psutil.STATUS_ZOMBIE
    assert done.n_parts_written == N_PARTS
    assert content(out) == content(uninterrupted)


def test_dask_writes_chosen_elements_and_cells_stored_by_gene(plates, tmp_path, write_h5ad):
    pytest.importorskip("distributed")
    collection = open_collection(plates)
    X = collection[:].X
    path = write_h5ad(sp.csc_matrix(X), layers={"twice": sp.csr_matrix(2 * X)})
    options: dict[str, Any] = {
        "elements": ["layers/twice", "X"], "rows": np.arange(0, N_CELLS, 3), "memory": MEMORY,
        "genes": [f"gene{number}" for number in range(0, 200, 3)],
    }  # fmt: skip
    alone, out = tmp_path / "alone.zarr", tmp_path / "out.zarr"
    preshuffle(path, alone, **options)
    with cluster(1, tmp_path) as (address, _):
        wait_for_workers(address, 1)
        preshuffle(path, out, scheduler=address, **options)
    assert content(out) == content(alone)
    copied = open_collection(out, elements=["X", "layers/twice"])
    cells = copied[:]
    names = copied.obs_names(slice(None))
    rows = np.array([int(name.removeprefix("cell")) for name in names])
    assert sorted(rows) == list(range(0, N_CELLS, 3))
    np.testing.assert_array_equal(cells.X.toarray(), X[rows][:, ::3].toarray())
    np.testing.assert_array_equal(cells["layers/twice"].toarray(), 2 * X[rows][:, ::3].toarray())


def test_dask_without_workers(plates, tmp_path):
    pytest.importorskip("distributed")
    no_workers = pytest.raises(ParameterError, match="the Dask scheduler has no workers")
    with cluster(0, tmp_path) as (address, _), no_workers:
        preshuffle(plates, tmp_path / "a.zarr", scheduler=address)


def test_no_scheduler_at_the_address(plates, out, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(parts, "_SECONDS_TO_CONNECT", 0.2)
    with pytest.raises(ParameterError, match="no Dask scheduler answers at tcp"):
        preshuffle(plates, out, scheduler="tcp://127.0.0.1:9")


def test_dask_that_is_not_installed(plates, out, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ParameterError, match=r"pip install 'cellfeed\[dask\]'"):
        preshuffle(plates, out, scheduler="tcp://127.0.0.1:9")


# annbatch

READ_BY_ANNBATCH = """
import json, sys
import anndata, annbatch, numpy, zarr
zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
collection = annbatch.DatasetCollection(sys.argv[1], mode="r")
assert not collection.is_empty
loader = annbatch.Loader(
    batch_size=64, chunk_size=16, preload_nchunks=8, shuffle=True, to=None, preload_to_gpu=False
).use_collection(collection)
n, total, files, rows = 0, 0.0, [], []
for batch in loader:
    sums = numpy.asarray(batch["X"].sum(axis=1)).ravel()
    files += list(map(str, batch["obs"]["source_file"]))
    rows += [[int(row), float(sum)] for row, sum in zip(batch["obs"]["source_row"], sums)]
print(json.dumps([files, rows, len(collection.obs())]))
"""


def run_annbatch(script: str, *arguments: object) -> Any:
    """Run a script in the environment of annbatch, and return what it prints last."""
    interpreter = Path(os.environ.get("CELLFEED_ANNBATCH_PYTHON", ANNBATCH))
    if not interpreter.exists():
        pytest.skip(f"no annbatch: neither CELLFEED_ANNBATCH_PYTHON is set nor is {ANNBATCH} there")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    running = subprocess.run(
        [interpreter, "-W", "ignore", "-c", script, *map(str, arguments)],
        capture_output=True, text=True, check=False, env=own,
    )  # fmt: skip
    assert running.returncode == 0, running.stderr
    return json.loads(running.stdout.splitlines()[-1])


def test_annbatch_reads_it(plates, uninterrupted):
    files, rows, n_obs = run_annbatch(READ_BY_ANNBATCH, uninterrupted)
    collection = open_collection(plates)
    assert len(files) == n_obs == N_CELLS
    names = [each.name for each in collection.locations]
    sizes = [len(open_collection(path)) for path in collection.files]
    starts = dict(zip(names, np.cumsum([0, *sizes]), strict=False))
    numbers = np.array([starts[name] + row for name, (row, _) in zip(files, rows, strict=True)])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(N_CELLS))
    sums = np.asarray(collection[numbers].X.sum(axis=1)).ravel()
    np.testing.assert_allclose([total for _, total in rows], sums)


READ_LAYER_BY_ANNBATCH = """
import json, sys
import anndata, annbatch, numpy, pandas
collection = annbatch.DatasetCollection(sys.argv[1], mode="r")

def load(group):
    layer = anndata.io.sparse_dataset(group["layers"]["twice"])
    return anndata.AnnData(X=layer, obs=anndata.io.read_elem(group["obs"]))

loader = annbatch.Loader(
    batch_size=64, chunk_size=16, preload_nchunks=8, shuffle=True, to=None, preload_to_gpu=False
).use_collection(collection, load_adata=load)
rows = []
for batch in loader:
    sums = numpy.asarray(batch["X"].sum(axis=1)).ravel()
    rows += [[int(row), float(sum)] for row, sum in zip(batch["obs"]["source_row"], sums)]
print(json.dumps(rows))
"""


@pytest.mark.parametrize("codec", ["delta", "annbatch"])
def test_annbatch_reads_a_layer(write_h5ad, out, codec):
    X = sp.csr_matrix(np.random.default_rng(0).poisson(0.3, (600, 50)).astype(np.float32))
    path = write_h5ad(X, layers={"twice": sp.csc_matrix(2 * X)})
    preshuffle(path, out, elements=["X", "layers/twice"], memory=200_000, codec=codec)
    rows = run_annbatch(READ_LAYER_BY_ANNBATCH, out)
    sums = 2 * np.asarray(X.sum(axis=1)).ravel()
    assert sorted(row for row, _ in rows) == list(range(600))
    assert all(sums[row] == found for row, found in rows)


WRITE_BY_ANNBATCH = """
import json, sys
import anndata, annbatch
out, options, *paths = sys.argv[1:]
annbatch.DatasetCollection(out).add_adatas(paths, shuffle_chunk_size=10, **json.loads(options))
print("null")
"""


@pytest.mark.parametrize(
    ("of_annbatch", "own"),
    [
        ({"shuffle": False}, {"join_vars": "outer", "in_order": True}),
        ({"dataset_size": 20}, {"join_vars": "outer", "memory": 15_000}),
        ({"var_subset": ["b", "d"]}, {"genes": ["b", "d"]}),
    ],
    ids=["in order", "shuffled and joined", "chosen genes"],
)
def test_the_same_cells_as_annbatch_writes(write_h5ad, tmp_path, of_annbatch, own):
    """The rows of the table in `docs/how-to/preshuffle.md`."""
    rng = np.random.default_rng(0)
    paths = [
        write_h5ad(sp.csr_matrix(rng.poisson(1, (n, len(genes))).astype(np.float32)), genes=genes)
        for n, genes in ((30, list("abcd")), (25, list("dbe")))
    ]
    theirs, ours = tmp_path / "theirs.zarr", tmp_path / "ours.zarr"
    run_annbatch(WRITE_BY_ANNBATCH, theirs, json.dumps(of_annbatch), *paths)
    preshuffle(paths, ours, codec="annbatch", elements=["X"], **own)
    genes = own.get("genes", list("abcde"))
    tables = []
    for store in (ours, theirs):
        cells = open_collection(store, genes=genes)
        X = cells[:].X.toarray()
        names = [name.partition("-")[0] for name in cells.obs_names(slice(None))]
        rows = [(name, *values) for name, values in zip(names, X.tolist(), strict=True)]
        tables.append(rows if own.get("in_order") else sorted(rows))
    assert tables[0] == tables[1]
