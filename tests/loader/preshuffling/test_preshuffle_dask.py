"""`preshuffle` on Dask: the same store, whoever writes it, also where a worker dies."""

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from tests.loader.preshuffling.test_preshuffle import content

import cellfeed.preshuffling._part as parts
from cellfeed import ParameterError, PathError, open_collection, preshuffle

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
N_CELLS, N_GENES, N_PARTS = 300, 40, 4
CHOSEN: dict[str, Any] = {
    "elements": ["layers/twice", "X"], "rows": np.arange(0, N_CELLS, 3),
    "genes": [f"gene{number}" for number in range(0, N_GENES, 3)], "memory": 20_000,
}  # fmt: skip


@pytest.fixture(scope="module")
def matrix() -> Any:
    rng = np.random.default_rng(0)
    return sp.csr_matrix(rng.poisson(0.3, (N_CELLS, N_GENES)).astype(np.float32))


@pytest.fixture(scope="module")
def path(write_h5ad, matrix) -> Path:
    """Cells that are stored by gene, and a layer by cell."""
    written: Path = write_h5ad(sp.csc_matrix(matrix), layers={"twice": 2 * matrix})
    return written


def check_chosen(store: Path, matrix: Any) -> None:
    copied = open_collection(store, elements=["X", "layers/twice"])
    cells = copied[:]
    rows = [int(name.removeprefix("cell")) for name in copied.obs_names(slice(None))]
    assert sorted(rows) == list(range(0, N_CELLS, 3))
    np.testing.assert_array_equal(cells.X.toarray(), matrix[rows][:, ::3].toarray())
    np.testing.assert_array_equal(cells["layers/twice"].toarray(), 2 * cells.X.toarray())


@pytest.mark.slow
def test_workers_in_this_process(path, matrix, tmp_path):
    distributed = pytest.importorskip("distributed")
    alone, out = tmp_path / "alone.zarr", tmp_path / "out.zarr"
    preshuffle(path, alone, **CHOSEN)
    none = {"n_workers": 0, "processes": False, "dashboard_address": None, "protocol": "tcp"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dask's own
        with distributed.LocalCluster(**none) as cluster:
            address = cluster.scheduler_address
            with pytest.raises(ParameterError, match="the Dask scheduler has no workers"):
                preshuffle(path, out, scheduler=address, **CHOSEN)
            cluster.scale(1)
            cluster.wait_for_workers(1, timeout=600)
            limit = r"may use .*, less than the .* of `memory`"
            with pytest.raises(ParameterError, match=limit):
                preshuffle(path, tmp_path / "a", scheduler=address, memory=10**15)
            done = preshuffle(path, out, scheduler=address, **CHOSEN)
    assert done.n_parts == done.n_parts_written > 1
    assert content(out) == content(alone)
    check_chosen(out, matrix)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[psutil.Popen]]]:
    """Start a scheduler and two workers on loopback, and stop them."""
    contact = folder / "scheduler.json"
    shared = ["--scheduler-file", str(contact), "--no-dashboard"]

    def started(module: str, *options: str) -> psutil.Popen:
        command = [sys.executable, "-W", "ignore", "-m", f"distributed.cli.{module}", *shared]
        null = subprocess.DEVNULL
        return psutil.Popen([*command, *options], stdout=null, stderr=null, cwd=folder)

    here = ["--host", "127.0.0.1"]
    processes = [started("dask_scheduler", *here, "--port", "0")]
    try:
        deadline = time.monotonic() + 600
        while not contact.exists() or not contact.read_text().endswith("}"):  # it is being written
            assert time.monotonic() < deadline, "the scheduler did not start"
            time.sleep(0.02)
        alone = ["--no-nanny", "--nthreads", "1", "--death-timeout", "300"]
        processes += [started("dask_worker", *here, *alone) for _ in range(2)]
        yield json.loads(contact.read_text())["address"], processes[1:]
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
            process.wait()


@pytest.mark.process
@pytest.mark.slow
def test_the_death_of_a_worker_is_survived(write_h5ad, matrix, tmp_path):
    distributed = pytest.importorskip("distributed")
    path, memory = write_h5ad(matrix), 60_000
    alone, out = tmp_path / "alone.zarr", tmp_path / "out.zarr"
    assert preshuffle(path, alone, memory=memory).n_parts == N_PARTS
    with cluster(tmp_path) as (address, workers):
        with distributed.Client(address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=600)

        def kill_one(stage, done, total):
            if stage == "write" and 0 < done < total:
                workers[0].kill()

        done = preshuffle(path, out, scheduler=address, on_progress=kill_one, memory=memory)
        assert not workers[0].is_running() or workers[0].status() == psutil.STATUS_ZOMBIE
    assert done.n_parts_written == N_PARTS
    assert content(out) == content(alone)


def test_no_scheduler_at_the_address(path, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(parts, "_SECONDS_TO_CONNECT", 0.2)
    with pytest.raises(ParameterError, match="no Dask scheduler answers at tcp"):
        preshuffle(path, tmp_path / "out", scheduler="tcp://127.0.0.1:9")


def test_dask_that_is_not_installed(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ParameterError, match=r"pip install 'cellfeed\[dask\]'"):
        preshuffle(path, tmp_path / "out", scheduler="tcp://127.0.0.1:9")


def test_workers_that_see_another_folder(path, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preshuffle(path, tmp_path / "out", on_progress=stop)
    with pytest.raises(PathError, match="is not visible to a Dask worker"):
        parts.write_part_of(str(tmp_path / "out"), "another token", 1)
