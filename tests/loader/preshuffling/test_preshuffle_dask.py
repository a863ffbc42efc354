"""`preshuffle` on Dask: the same store, whoever writes it, also where a worker dies."""

import json
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.preshuffling.test_preshuffle import content

import cellfeed.preshuffling._preshuffle as preshuffling
from cellfeed import MismatchError, ParameterError, PathError, open_collection, preshuffle
from cellfeed.preshuffling import _dataset

pytestmark = [
    pytest.mark.usefixtures("zarr_in_this_thread"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in"),
]
N_CELLS, N_GENES = 300, 40
GENES = [f"gene{number:04000}" for number in range(N_GENES)]  # a task of Dask is larger than 100 kB
MEMORY, N_PARTS = 75_000, 3
ADDRESS = "tcp://127.0.0.1:9"
CHOSEN: dict[str, Any] = {
    "elements": ["layers/twice", "X"], "rows": np.arange(0, N_CELLS, 3), "group_by": "lab",
    "genes": GENES[::3], "memory": 35_000,
}  # fmt: skip


@pytest.fixture(scope="module")
def matrix() -> Any:
    rng = np.random.default_rng(0)
    return sp.csr_matrix(rng.poisson(0.3, (N_CELLS, N_GENES)).astype(np.float32))


@pytest.fixture(scope="module")
def path(write_h5ad, matrix) -> Path:
    labs = {"lab": np.array(["a", "b", "c"])[np.arange(N_CELLS) % 3]}
    written: Path = write_h5ad(matrix, labs, genes=GENES, layers={"twice": 2 * matrix})
    return written


@pytest.fixture(scope="module")
def alone(path, new_folder) -> Path:
    """What one machine writes; not to be changed."""
    store: Path = new_folder() / "alone.zarr"
    assert preshuffle(path, store, memory=MEMORY).n_parts == N_PARTS
    return store


@pytest.fixture(scope="module")
def chosen_alone(path, new_folder) -> Path:
    """What one machine writes of chosen cells; not to be changed."""
    store: Path = new_folder() / "chosen.zarr"
    preshuffle(path, store, **CHOSEN)
    return store


# A cluster whose only worker is this process


@pytest.fixture
def cluster_here(monkeypatch) -> Callable[..., None]:
    """Take the place of Dask; `before` is called before the worker writes each part."""

    def start(before: Callable[[], object] = lambda: None) -> None:
        class Client:
            loop = None

            def __init__(self, address: str, **_: Any) -> None:
                assert address == ADDRESS

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def scheduler_info(self, **_: Any) -> Any:
                return {"workers": {"tcp://127.0.0.1:10": {"memory_limit": None}}}

            def submit(self, function: Any, *arguments: Any, pure: bool) -> Any:
                assert not pure
                return function(*arguments)

            def map(self, function: Any, numbers: Any, *, pickled: bytes, **_: Any) -> Any:
                for task in (pickle.dumps((function, number)) for number in numbers):
                    received, number = pickle.loads(task)
                    before()
                    yield SimpleNamespace(result=lambda f=received, n=number: f(n, pickled))

        errors = {name: type(name, (Exception,), {}) for name in ("CancelledError", "KilledWorker")}
        fake = SimpleNamespace(Client=Client, as_completed=lambda futures, **_: futures, **errors)
        monkeypatch.setitem(sys.modules, "distributed", fake)
        config = SimpleNamespace(set=lambda _: nullcontext())
        monkeypatch.setitem(sys.modules, "dask", SimpleNamespace(config=config))

    return start


def test_a_worker_writes_what_one_machine_writes(path, matrix, out, cluster_here, chosen_alone):
    """It gets chosen cells and genes, and elements, as the process that asks has them."""
    cluster_here()
    done = preshuffle(path, out, scheduler=ADDRESS, **CHOSEN)
    assert done.n_parts == done.n_parts_written > 1
    assert content(out) == content(chosen_alone)
    copied = open_collection(out, elements=["X", "layers/twice"])
    cells = copied[:]
    rows = [int(name.removeprefix("cell")) for name in copied.obs_names(slice(None))]
    assert sorted(rows) == list(range(0, N_CELLS, 3))
    np.testing.assert_array_equal(cells.X.toarray(), matrix[rows][:, ::3].toarray())
    np.testing.assert_array_equal(cells["layers/twice"].toarray(), 2 * cells.X.toarray())


@pytest.mark.slow
def test_cells_are_appended_by_workers(path, write_h5ad, matrix, tmp_path, cluster_here, alone):
    one, other = tmp_path / "one.zarr", tmp_path / "other.zarr"
    cluster_here()
    new = write_h5ad(matrix[:90], {"lab": ["d"] * 90}, genes=GENES)
    for out, scheduler in ((one, None), (other, ADDRESS)):
        shutil.copytree(alone, out)
        options: dict[str, Any] = {"mix": 1, "memory": MEMORY, "scheduler": scheduler}
        assert preshuffle(new, out, append=True, **options).n_parts_written > 1
    found, expected = content(other), content(one)
    assert found.pop("zarr.json") != expected.pop("zarr.json")  # names the parts that were merged
    assert found == expected


@pytest.mark.slow
def test_parts_that_are_written_twice(path, out, cluster_here, alone, monkeypatch):
    """Dask repeats what a worker that died had completed, or is still about to complete."""
    cluster_here()
    real, written = preshuffling.write_part, list[int]()

    def write(folder: Any, job: Any, inputs: Any, number: int, on_share: Any) -> None:
        def before_it_is_complete(share: float) -> None:
            on_share(share)
            if share == 1 and number == 0:
                assert not folder.part(0).exists()
                real(folder, job, inputs, 0, on_share)
                real(folder, job, inputs, 2, on_share)

        written.append(number)
        real(folder, job, inputs, number, before_it_is_complete)

    monkeypatch.setattr(preshuffling, "write_part", write)
    preshuffle(path, out, scheduler=ADDRESS, memory=MEMORY)
    assert written == [0, 1]
    assert content(out) == content(alone)


def test_inputs_that_changed_or_are_not_there(path, tmp_path, cluster_here):
    given, away = tmp_path / "cells.h5ad", tmp_path / "away.h5ad"
    shutil.copy(path, given)
    cluster_here(lambda: given.rename(away))
    with pytest.raises(PathError) as missing:
        preshuffle(given, tmp_path / "out", scheduler=ADDRESS)
    line = f"{given}: no such file on a Dask worker; give paths that all machines share"
    assert str(missing.value) == line
    cluster_here(lambda: given.write_bytes(away.read_bytes() + b"0"))
    shutil.copy(path, given)
    with pytest.raises(MismatchError, match=r"has changed since shuffling began; remove the out"):
        preshuffle(given, tmp_path / "other", scheduler=ADDRESS)


def test_an_output_that_a_worker_does_not_see(path, out, cluster_here):
    cluster_here(lambda: shutil.rmtree(out))
    with pytest.raises(PathError) as error:
        preshuffle(path, out, scheduler=ADDRESS)
    why = "a Dask worker does not see it, or it was begun anew; give an output that all machines"
    assert str(error.value) == f"{out}: {why} share"


@pytest.mark.parametrize("at", ["append", "elements"])
def test_a_worker_stops_when_its_output_was_begun_anew(path, out, cluster_here, monkeypatch, at):
    """While it reads, and while it writes; it then adds nothing to what the other run writes."""
    real = getattr(_dataset.CsrPart, at)
    cluster_here()

    def with_another_record(*arguments: Any) -> Any:
        record = out / ".cellfeed" / "job.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"seed": 7}))
        return real(*arguments)

    monkeypatch.setattr(_dataset.CsrPart, at, with_another_record)
    with pytest.raises(PathError, match="or it was begun anew; give an output"):
        preshuffle(path, out, scheduler=ADDRESS)
    assert [each.name for each in out.iterdir()] == [".cellfeed"]
    assert {each.name for each in (out / ".cellfeed").iterdir()} == {"job.json", "lock"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("KilledWorker", "several Dask workers died while writing the same part; give less `mem"),
        (
            "CancelledError",
            f"the Dask scheduler at {ADDRESS} ended; start one, and repeat",
        ),
    ],
)
def test_a_cluster_that_ends_is_one_line(path, out, cluster_here, error, message):
    def fail() -> None:
        raise getattr(sys.modules["distributed"], error)

    cluster_here(fail)
    with pytest.raises(ParameterError, match=message):
        preshuffle(path, out, scheduler=ADDRESS)


def test_dask_that_is_not_installed(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    refused = commands.cellfeed("preshuffle", path, tmp_path / "out", "--scheduler", ADDRESS)
    assert (refused.exit_code, refused.stdout) == (2, "")
    remedy = "`--scheduler` needs Dask; install it with `pip install 'cellfeed[dask]'`"
    assert refused.stderr == f"Error: {remedy}\n"


# Dask itself


@pytest.mark.slow
def test_workers_in_this_process(path, tmp_path, out, chosen_alone, monkeypatch):
    """A run that is stopped is resumed, with two threads of a worker that take turns."""
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    monkeypatch.setattr(preshuffling, "_SECONDS_TO_CONNECT", 0.2)
    with pytest.raises(ParameterError, match="no Dask scheduler answers at tcp"):
        preshuffle(path, tmp_path / "a", scheduler=ADDRESS)
    monkeypatch.undo()

    def stop(stage: str, done: float, total: float) -> None:
        if stage == "write" and done:
            raise KeyboardInterrupt

    none = {"n_workers": 0, "processes": False, "dashboard_address": None, "protocol": "tcp"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dask's own
        warnings.filterwarnings("error", "Sending large graph")
        with distributed.LocalCluster(**none, threads_per_worker=2) as cluster:
            address = cluster.scheduler_address
            with pytest.raises(ParameterError, match="the Dask scheduler has no workers"):
                preshuffle(path, out, scheduler=address, **CHOSEN)
            cluster.scale(1)
            cluster.wait_for_workers(1, timeout=600)
            limit = r"may use .*, less than the .* of `memory`"
            with pytest.raises(ParameterError, match=limit):
                preshuffle(path, tmp_path / "b", scheduler=address, memory=10**15)
            with pytest.raises(KeyboardInterrupt):
                preshuffle(path, out, scheduler=address, on_progress=stop, **CHOSEN)
            # As if more than a million cells were chosen.
            with dask.config.set({"distributed.admin.large-graph-warning-threshold": 1}):
                done = preshuffle(path, out, scheduler=address, **CHOSEN)
    assert 0 < done.n_parts_written < done.n_parts
    assert content(out) == content(chosen_alone)


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
        yield json.loads(contact.read_text())["address"], processes
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
            process.wait()


@pytest.mark.process
@pytest.mark.slow
def test_the_death_of_a_worker_is_survived_and_that_of_the_scheduler_resumed(path, tmp_path, alone):
    distributed = pytest.importorskip("distributed")
    out, other = tmp_path / "out.zarr", tmp_path / "other.zarr"
    with cluster(tmp_path) as (address, (scheduler, worker, _)):
        with distributed.Client(address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=600)

        def killing(process: psutil.Popen) -> Callable[[str, float, float], None]:
            def kill(stage: str, done: float, total: float) -> None:
                if stage == "write" and 0 < done < total:
                    process.kill()

            return kill

        options: dict[str, Any] = {"scheduler": address, "memory": MEMORY}
        done = preshuffle(path, out, on_progress=killing(worker), **options)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        assert done.n_parts_written == N_PARTS
        assert content(out) == content(alone)
        with pytest.raises(ParameterError, match=r"ended; start one, and repeat the call to res"):
            preshuffle(path, other, on_progress=killing(scheduler), **options)
    assert preshuffle(path, other, memory=MEMORY).n_parts_written < N_PARTS
    assert content(other) == content(alone)
