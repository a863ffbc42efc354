"""Minibatches of worker processes lie in memory that is lent, whatever becomes of either."""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense
from tests.loader.threads import wait_for_dropped
from torch.utils.data import DataLoader

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.dataset._workers import Event

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def file(write_h5ad):
    matrix = sp.random(600, 900, density=0.2, format="csr", dtype=np.float32, random_state=0)
    return write_h5ad(matrix, {"number": np.arange(600.0)})


def dataset_of(file, **options):
    collection = open_collection(file, obs=["number"])
    return CellDataset(collection, BlockShuffling(block_size=4), 32, 4, seed=0, **options)


def arrays(minibatch):
    """Return what a minibatch consists of, in NumPy, and copied."""
    parts = dense(minibatch.X), minibatch.obs["number"], minibatch.rows
    return [np.asarray(each).copy() for each in parts]


def by_first_row(minibatches):
    return {int(each[2][0]): each for each in map(arrays, minibatches)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, own in found.items():
        assert all(map(np.array_equal, own, expected[key]))


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_and_in_a_plain_data_loader(file, persistent):
    own, other, of_plain = (dataset_of(file) for _ in range(3))
    loader = own.loader(2, persistent_workers=persistent)
    of_plain.set_epoch(0)
    plain = DataLoader(of_plain, None, num_workers=2, persistent_workers=persistent)
    for epoch in range(3):
        if not persistent:
            of_plain.set_epoch(epoch)
        expected = by_first_row(other)
        assert_same(by_first_row(loader), expected)
        assert_same(by_first_row(plain), expected)


def test_who_breaks_off_begins_anew(file):
    loader, other = dataset_of(file).loader(2, persistent_workers=True), dataset_of(file)
    kept = [next(iter(loader)) for _ in range(3)]
    other.set_epoch(3)
    assert_same(by_first_row(loader), by_first_row(other))
    assert len({int(arrays(each)[2].sum()) for each in kept}) == 3


def test_who_changes_them_changes_no_other(file):
    """Memory comes back with what the consumer wrote into it."""
    expected, found = by_first_row(dataset_of(file)), []
    for minibatch in dataset_of(file).loader(2, prefetch_factor=1):
        found.append(arrays(minibatch))
        minibatch.X.values().fill_(-1)
        minibatch.X.col_indices().fill_(0)
    assert_same({int(each[2][0]): each for each in found}, expected)


class WithTheOneBefore:
    """A function that keeps a minibatch after it has returned it."""

    def __init__(self):
        self.kept = deque[Any](maxlen=3)

    def __call__(self, minibatch):
        before = [float(each.X.values().sum()) for each in self.kept]
        self.kept.append(minibatch)
        return minibatch, before


@pytest.mark.parametrize("by", ["batch_transform", "collate_fn"])
def test_what_a_function_keeps_is_not_lent(file, by):
    def sums(loader, *, are_changed):
        found = []
        for minibatch, before in loader:
            if are_changed:
                minibatch.X.values().fill_(-1)
            found += before
        return sorted(found)

    options = {"batch_transform": WithTheOneBefore()} if by == "batch_transform" else {}
    expected = sums(dataset_of(file, batch_transform=WithTheOneBefore()), are_changed=False)
    loader = dataset_of(file, **options).loader(
        1, **({} if options else {"collate_fn": WithTheOneBefore()})
    )
    assert sums(loader, are_changed=True) == pytest.approx(expected)


def n_mapped():
    """Return how often this process has memory mapped that workers lend."""
    return len(re.findall("memfd:cellfeed", Path("/proc/self/maps").read_text()))


def lent_here():
    wait_for_dropped()  # which a thread closes
    gc.collect()
    return n_mapped()


class Killed:
    """Ends one worker at its third minibatch."""

    def __init__(self, folder):
        self.n, self.file = 0, folder / "killed"

    def __call__(self, minibatch):
        self.n += 1
        if self.n == 3:
            with contextlib.suppress(FileExistsError):
                self.file.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return minibatch


def with_what_is_lent(minibatch):
    return minibatch, os.getpid(), n_mapped()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="of Linux alone")
class TestMemory:
    def test_does_not_grow_with_the_minibatches(self, file):
        taken = {}
        dataset = dataset_of(file, batch_transform=with_what_is_lent, dense=True)
        loader = dataset.loader(2, persistent_workers=True)
        for epoch in range(6):
            for minibatch, worker, n_lent in loader:
                taken[worker, epoch] = n_lent
                del minibatch
        workers = {worker for worker, _ in taken}
        assert len(workers) == 2
        for worker in workers:
            assert taken[worker, 5] == taken[worker, 1] > 0, taken

    def test_nothing_is_left(self, file):
        before = lent_here()
        for _minibatch in dataset_of(file).loader(2):
            assert lent_here() > before
        del _minibatch
        assert lent_here() == before

    def test_what_was_delivered_stays(self, file):
        before = lent_here()
        loader = dataset_of(file).loader(2, persistent_workers=True)
        kept = next(iter(loader))
        expected = arrays(kept)
        del loader
        assert_same({0: arrays(kept)}, {0: expected})
        del kept
        assert lent_here() == before

    def test_a_worker_that_is_killed(self, file, tmp_path):
        before = lent_here()
        iterator = iter(dataset_of(file, batch_transform=Killed(tmp_path)).loader(2))
        ours = {os.getpid(), *(each.pid for each in multiprocessing.active_children())}
        with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
            list(iterator)
        del iterator
        assert lent_here() == before
        # Others may have files there; torch names its own by process.
        files = Path("/dev/shm").iterdir()
        assert not [each for each in files if any(f"_{pid}_" in each.name for pid in ours)]


def test_one_that_ends_while_it_looks_at_its_event_locks_nothing():
    """That of multiprocessing stays locked, and who sets it waits without end."""
    context = multiprocessing.get_context("fork")
    event = Event(context)

    def look():
        while not event.is_set():
            pass

    for _ in range(20):
        process = context.Process(target=look)
        process.start()
        time.sleep(0.01)
        process.kill()
        process.join()
    setting = threading.Thread(target=event.set, daemon=True)
    setting.start()
    setting.join(60.0)
    assert event.is_set()
    assert not setting.is_alive()


TRAINING = """
import signal, sys, threading, time
from torch.utils.data import _utils
from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.dataset._workers import Event

_utils.MP_STATUS_CHECK_INTERVAL = 3600  # as long as torch waits for workers that do not end
path, how, context = sys.argv[1:]
n_collated, interrupts = 0, []

def say_that_it_waits():
    # Once no line of this script runs: in `next`, that is.
    main = threading.main_thread().ident
    while not is_next or sys._current_frames()[main].f_code.co_filename == __file__:
        time.sleep(0.01)
    print("training", flush=True)

def collate(minibatch):
    global n_collated
    n_collated += 1
    time.sleep(3600 if how == "waiting" and n_collated > 1 else 0)
    return minibatch

if __name__ == "__main__":
    own = signal.default_int_handler if how != "going on" else lambda *_: interrupts.append(1)
    signal.signal(signal.SIGINT, own)
    dataset = CellDataset(open_collection(path), BlockShuffling(4), 32, 1, seed=0)
    n, is_next = 0, False
    options = {"prefetch_factor": 1, "multiprocessing_context": context}
    for minibatch in dataset.loader(4, collate_fn=collate, **options):
        n += 1
        if n == 4 and how == "waiting":
            threading.Thread(target=say_that_it_waits, daemon=True).start()
            is_next = True
        elif n == 4:
            print("training", flush=True)
            while not interrupts:
                time.sleep(0.01)
    print(n == len(dataset))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "context"),
    [("computing", "fork"), ("waiting", "fork"), ("going on", "forkserver")],
)
def test_ctrl_c_is_for_the_training_process_alone(file, tmp_path, how, context):
    """It computes, or waits for workers that take an hour; or has another use for Ctrl-C."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(file), how, context],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as training:  # fmt: skip
        try:
            assert training.stdout is not None
            assert training.stdout.readline() == "training\n"
            processes = psutil.Process(training.pid).children(recursive=True)
            assert len(processes) >= 2
            os.killpg(training.pid, signal.SIGINT)
            out, err = training.communicate(timeout=300)
        finally:
            training.kill()
    if how == "going on":
        assert (training.returncode, out, err) == (0, "True\n", "")
    else:
        assert training.returncode == -signal.SIGINT
        assert err.count("Traceback") == 1
        assert err.splitlines()[-1] == "KeyboardInterrupt"
        assert "Process" not in err.replace("_MultiProcessing", "")
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
