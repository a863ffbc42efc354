"""`preshuffle` that is killed or stopped, and on Dask."""

import json
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
            while True:  # a signal that comes just before a sleep is handled after it
                time.sleep(0.01)
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
    with commands.files_end_after(20_000):
        result = commands.cellfeed(*arguments)
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
        while not contact.exists() or not contact.read_text().endswith("}"):  # it is being written
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
