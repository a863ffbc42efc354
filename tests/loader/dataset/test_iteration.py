"""Iterations that are dropped, interrupted, forked, or alive when Python ends."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from tests.loader.threads import (
    no_iteration_of_other_tests,  # noqa: F401 - a fixture
    threads_of_iterations,
    wait_for_dropped,
)
from tests.warm import python as warm

from cellfeed import BlockShuffling, CellDataset, DeliveryError, open_collection

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
COUNTS = sp.random(96, 30, density=0.3, format="csr", dtype=np.float32, random_state=0)


@pytest.fixture(scope="module")
def path(write_h5ad):
    return write_h5ad(COUNTS)


def dataset_over(collection, **options):
    sizes = {"batch_size": 4, "fetch_factor": 3, "seed": 0}
    return CellDataset(collection, BlockShuffling(block_size=4), **(sizes | options))


DATASETS = {
    "sparse": lambda path: dataset_over(open_collection(path)),
    "dense": lambda path: dataset_over(open_collection(path), dense=True),
    "transformed": lambda path: dataset_over(open_collection(path), fetch_transform=lambda f: f),
    "indexable": lambda path: dataset_over(np.arange(96)),
}


def collect(reference, seconds=600):
    """Collect what is referred to: `gc.collect` does nothing while another thread collects."""
    end = time.monotonic() + seconds
    while reference() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert reference() is None


class TestDropping:
    """Ctrl-C that arrives in Python code which a destructor runs is printed and forgotten."""

    @pytest.mark.parametrize("kind", ["sparse", "dense", "transformed"])
    def test_a_minibatch_is_kept_by_its_consumer_alone(self, path, kind):
        """torch ends the process where a thread drops a tensor while Python shuts down."""
        pytest.importorskip("torch")
        iterator = iter(DATASETS[kind](path))
        for _ in range(5):
            minibatch = next(iterator)
            tensors = [weakref.ref(each) for each in (minibatch.X, minibatch.rows)]
            del minibatch
            assert [tensor() for tensor in tensors] == [None, None]
        iterator.close()

    @pytest.mark.parametrize("kind", DATASETS)
    def test_a_minibatch_runs_no_python(self, path, kind, python_calls_of_dropping):
        iterator = iter(DATASETS[kind](path))
        held = [next(iterator) for _ in range(5)]
        assert python_calls_of_dropping(held) == []
        iterator.close()
        dataset = [dataset_over(np.arange(96))]
        assert len(list(dataset[0])) == 24
        assert python_calls_of_dropping(dataset) == []

    @pytest.mark.parametrize("num_workers", [None, 0, pytest.param(1, marks=pytest.mark.process)])
    @pytest.mark.parametrize("kind", DATASETS)
    def test_an_iterator_runs_no_python(self, path, kind, num_workers, python_calls_of_dropping):
        before = multiprocessing.active_children()
        dataset = DATASETS[kind](path)
        held = [iter(dataset if num_workers is None else dataset.loader(num_workers))]
        for _ in range(4):
            next(held[0])
        # torch has a generator that ends without running a line, as those without `finally` do.
        assert set(python_calls_of_dropping(held)) <= {"_InfiniteConstantSampler.__iter__"}
        wait_for_dropped()
        assert set(multiprocessing.active_children()) <= set(before)

    @pytest.mark.parametrize("kind", DATASETS)
    def test_in_another_thread(self, path, kind):
        held = [iter(DATASETS[kind](path))]
        next(held[0])
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        wait_for_dropped()
        assert threads_of_iterations() == []

    def test_with_what_refers_to_it(self, path):
        knot = [iter(dataset_over(open_collection(path)))]
        next(knot[0])
        knot.append(knot)
        iteration = weakref.ref(knot[0])
        del knot
        collect(iteration)
        wait_for_dropped()
        assert threads_of_iterations() == []

    def test_the_next_begins_when_the_dropped_one_has_ended(self, path):
        dataset = dataset_over(open_collection(path))
        for _ in range(5):
            for _minibatch in dataset:
                break
            names = [t.name for t in threading.enumerate()]
            assert names.count("cellfeed-closing") <= 1


@pytest.mark.process
class TestInterrupts:
    def test_in_the_fork_of_a_worker(self, path):
        armed = [True]

        def interrupt_once():
            if armed:
                armed.clear()
                signal.raise_signal(signal.SIGINT)

        os.register_at_fork(after_in_parent=interrupt_once)
        loader = dataset_over(open_collection(path)).loader(1)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert sum(map(len, loader)) == 96

    @pytest.mark.parametrize("whom", ["parent", "all"])
    def test_leave_no_process_behind(self, path, tmp_path, whom):
        pytest.importorskip("torch")
        script = tmp_path / "script.py"
        script.write_text(_LOOP.format(path=str(path)))
        process = warm.FinalizedPopen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 2
        (os.kill if whom == "parent" else os.killpg)(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGINT, errors
        assert not any(worker.is_running() for worker in workers)
        left = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []  # noqa: PTH112, PTH208
        assert not any(f"_{each.pid}_" in name for each in workers for name in left)


_LOOP = """
import itertools, signal
from cellfeed import BlockShuffling, CellDataset, open_collection

signal.signal(signal.SIGINT, signal.default_int_handler)
dataset = CellDataset(
    open_collection({path!r}), BlockShuffling(block_size=4), batch_size=4, fetch_factor=2, seed=0
)
for minibatch in dataset.loader(2, persistent_workers=True):
    pass
loader = dataset.loader(2)
iterator = iter(loader)
next(iterator)
del minibatch
print("begun", flush=True)
while True:
    pass
"""


_KILLED = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from cellfeed import BlockShuffling, CellDataset

def outlive_the_parent(number):
    Path(sys.argv[1], str(os.getpid())).touch()
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)

if __name__ == "__main__":
    dataset = CellDataset(np.arange(96), BlockShuffling(4), 4, 2, seed=0)
    options = dict(multiprocessing_context=sys.argv[2], worker_init_fn=outlive_the_parent)
    for minibatch in dataset.loader(1, **options):
        pass
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_parent_that_is_killed_while_a_worker_starts_leaves_none_behind(tmp_path, method):
    pytest.importorskip("torch")
    script, folder = tmp_path / "script.py", tmp_path / "workers"
    folder.mkdir()
    script.write_text(_KILLED)
    # Not by pipes, which a worker that is left behind holds open.
    command = [sys.executable, script, folder, method]
    ended = warm.run(command, stdout=None, stderr=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGKILL
    (worker,) = (int(each.name) for each in folder.iterdir())
    with contextlib.suppress(psutil.NoSuchProcess):
        try:
            psutil.Process(worker).wait(timeout=600)
        except psutil.TimeoutExpired:
            os.kill(worker, signal.SIGKILL)
            raise


def go_on(iterator, connection):
    try:
        next(iterator)
    except DeliveryError as error:
        connection.send(str(error))
    held = [iterator]
    del iterator
    held.clear()
    gc.collect()
    connection.send("dropped")


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [None, 2])
@pytest.mark.parametrize("n_before", [0, 3])
def test_an_iterator_in_a_forked_process(path, num_workers, n_before):
    dataset = dataset_over(open_collection(path))
    iterator = iter(dataset if num_workers is None else dataset.loader(num_workers))
    n_rows = sum(len(next(iterator)) for _ in range(n_before))
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=go_on, args=(iterator, sending), daemon=True)
    child.start()
    try:
        assert receiving.poll(600)
        message = receiving.recv()
        assert message.startswith(
            f"an iterator only works in the process that made it, {os.getpid()}"
        )
        assert "\n" not in message
        assert receiving.poll(600)
        assert receiving.recv() == "dropped"
    finally:
        child.kill()
        child.join()
    assert n_rows + sum(map(len, iterator)) == 96


_EXIT = """
import sys
from cellfeed import BlockShuffling, CellDataset, open_collection

dataset = CellDataset(
    open_collection({path!r}), BlockShuffling(block_size=4), batch_size=4, fetch_factor=3, seed=0,
    dense={dense},
)
iterator = iter({what})
for _ in range(4):
    minibatch = next(iterator)
{end}
"""
_DROPPED = """
import time
from cellfeed.dataset._run import Iteration

def numbers():
    try:
        yield 1
        yield 2
    finally:
        time.sleep(1)
        print("closed")

iteration = Iteration(numbers)
next(iteration)
del iteration
"""
_PERSISTENT = """
import numpy as np
from cellfeed import BlockShuffling, CellDataset

dataset = CellDataset(np.arange(96), BlockShuffling(4), 16, 2, seed=0)
loader = dataset.loader(1, persistent_workers=True, multiprocessing_context="fork")
for minibatch in loader:
    pass
"""


@pytest.mark.process
class TestPythonEnds:
    @pytest.mark.parametrize(
        "end", ["", "del iterator", "dataset.iterator = iterator", "sys.exit()"]
    )
    @pytest.mark.parametrize("what", ["dataset", "dataset.loader()", "dataset.loader(2)"])
    def test_silently(self, path, end, what):
        pytest.importorskip("torch")
        script = _EXIT.format(path=str(path), what=what, end=end, dense=end == "")
        ended = warm.run([sys.executable, "-c", script], is_finalized=True)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")

    def test_when_what_was_dropped_is_closed(self):
        """Else its thread would be stopped wherever it is, perhaps with a lock in its hands."""
        command = [sys.executable, "-c", _DROPPED]
        assert warm.run(command, is_finalized=True).stdout == "closed\n"

    @pytest.mark.slow
    def test_with_workers_that_persist(self):
        """Run by Python itself, which then empties the modules in its own order."""
        pytest.importorskip("torch")
        ended = subprocess.run(
            [sys.executable, "-c", _PERSISTENT], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])
def test_a_closed_loader_leaves_nothing_under_way(path, num_workers):
    wait_for_dropped()  # of other tests
    others = {*threading.enumerate(), *psutil.Process().children()}
    options = {"batch_transform": len, "transform_threads": 2}
    minibatches = iter(dataset_over(open_collection(path), **options).loader(num_workers))
    next(minibatches)
    minibatches.close()
    threads = [each for each in threading.enumerate() if each.name.startswith("cellfeed-")]
    assert {*threads, *psutil.Process().children()} <= others
