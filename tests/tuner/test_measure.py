"""Measuring one configuration: its rounds, its figures, and the process that it runs in."""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import psutil
import pytest
from tests.tuner.measured_here import MeasuringHere, events_of
from tests.tuner.other_loaders import (
    EndsEarly,
    Fails,
    Opened,
    Unpicklable,
    collate_nothing,
    slowly,
)
from tests.warm import python as warm
from torch.utils.data import DataLoader

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    EpochPlan,
    FormatError,
    MatchedControls,
    ParameterError,
    Streaming,
    open_collection,
)
from cellfeed_tuner import Configuration, Measurement, measure, minibatch_entropies
from cellfeed_tuner._constants import FEWEST_ROUNDS, LEAST_ROUNDS
from cellfeed_tuner._measuring import _page_cache
from cellfeed_tuner._measuring._measurement import measure_with, pooled
from cellfeed_tuner._measuring._process import MeasuringError, MeasuringProcess, kill_tree
from cellfeed_tuner._measuring._timing import DatasetSession, Round, TimingRequest

BATCH_SIZE = 32
HERE_AND_WITH_A_WORKER = [0, pytest.param(1, marks=pytest.mark.process)]


@pytest.fixture
def here(monkeypatch):
    """Configurations are timed in this process."""
    module = "cellfeed_tuner._measuring._measurement.MeasuringProcess"
    monkeypatch.setattr(module, MeasuringHere)


@pytest.fixture(scope="module")
def collection(small_collection):
    return open_collection(small_collection, obs=["plate", "cell_type"])


@pytest.fixture(scope="module")
def one_file(small_collection):
    return open_collection(small_collection / "plate0.h5ad", obs=["cell_type"])


def measured(*arguments, **settings):
    return measure(*arguments, **{"batch_size": BATCH_SIZE, "seconds": 0.01} | settings)


def request_of(configuration, **settings):
    """The fewest rounds."""
    asked: dict[str, Any] = {
        "batch_size": 1, "labels": (), "cache": "warm", "seed": 0, "seconds": 0.0,
        "least_rounds": LEAST_ROUNDS, "most_rounds": LEAST_ROUNDS,
    }  # fmt: skip
    return TimingRequest(configuration=configuration, **asked | settings)


def planned_bits(codes, block_size, fetch_factor, *, strategy=None, **settings):
    """Entropy of each whole fetch of an epoch."""
    plan = EpochPlan(
        strategy=strategy or BlockShuffling(block_size),
        n_rows=len(codes),
        fetch_factor=fetch_factor,
        **{"batch_size": BATCH_SIZE} | settings,
    )
    bits = minibatch_entropies(codes, plan)[: plan.n_whole_fetches * fetch_factor]
    return bits.reshape(-1, fetch_factor).mean(axis=1)


@pytest.mark.usefixtures("here")
class TestRounds:
    @pytest.mark.parametrize("num_workers", HERE_AND_WITH_A_WORKER)
    def test_are_whole_fetches_of_the_plan(self, collection, num_workers):
        """What came out is what the plan says, from the first fetch on."""
        configuration = Configuration(block_size=16, fetch_factor=4, num_workers=num_workers)
        labels = ["plate", "cell_type"]
        found = measured(collection, configuration, label=labels, seed=3)
        assert found.status == "timed"
        assert found.cells_per_round == 4 * BATCH_SIZE
        assert len(found.round_seconds) >= LEAST_ROUNDS
        speed = found.cells_per_second
        assert speed.low <= speed.value <= speed.high
        assert found.first_minibatch_seconds is not None
        assert found.peak_memory_bytes > 10_000_000
        for label in labels:
            bits = planned_bits(collection.obs[label].values, 16, 4, seed=3)
            seen = np.array(found.round_entropy_bits[label][: bits.size])
            assert seen == pytest.approx(bits[: seen.size])

    @pytest.mark.parametrize("num_workers", HERE_AND_WITH_A_WORKER)
    def test_of_another_strategy_too(self, collection, num_workers):
        configuration = Configuration(block_size=1, fetch_factor=4, num_workers=num_workers)
        found = measured(collection, configuration, strategy=Streaming(), label="cell_type")
        assert (found.status, found.delivery_fault) == ("timed", "")
        bits = planned_bits(collection.obs["cell_type"].values, 1, 4, strategy=Streaming())
        seen = np.array(found.round_entropy_bits["cell_type"])[: bits.size]
        assert seen == pytest.approx(bits[: seen.size])

    def test_a_short_epoch_is_followed_by_the_next(self, one_file):
        configuration = Configuration(block_size=16, fetch_factor=32)  # one fetch to an epoch
        found = measured(one_file, configuration, label="cell_type")
        assert len(found.round_seconds) >= LEAST_ROUNDS
        assert len(set(found.round_entropy_bits["cell_type"])) > 1  # each epoch in another order
        # Nothing is said of reads, since more or less was read ahead.
        assert found.bytes_read_per_cell is None

    def test_of_one_epoch_after_the_other(self):
        """Of five minibatches, two fetches of two are timed in each epoch."""
        taken = list[int]()
        request = request_of(Configuration(fetch_factor=2), step=taken.append)
        events = events_of(request, Opened(partial(range, 5)))
        n_rounds = sum(isinstance(each, Round) for each in events)
        assert n_rounds == 1 + LEAST_ROUNDS
        assert taken == ([0, 1, 2, 3] * n_rounds)[: 2 * n_rounds]

    def test_every_epoch_begins_with_files_that_are_not_cached(self, tmp_path):
        file = tmp_path / "data"
        file.write_bytes(bytes(1 << 20))
        _page_cache.drop_pages([file])
        if _page_cache.resident_fraction([file]) != 0:
            pytest.skip("pages of this file system cannot be dropped")
        resident = list[float | None]()

        def read(_):
            resident.append(_page_cache.resident_fraction([file]))
            file.read_bytes()

        request = request_of(Configuration(), step=read, cache="cold")
        events_of(request, Opened(partial(range, 1), files=[file]))
        assert resident == [0.0] * (1 + LEAST_ROUNDS)

    @pytest.mark.parametrize("values", [[-3.0, -2.0, -1.0], [0.5, np.nan, 2.0]])
    def test_numbers_are_labels_as_they_are_in_theory(self, tmp_path, values):
        """Negative numbers are no missing codes, and NaN is one."""
        obs = pd.DataFrame({"score": np.repeat(values, 500)}, index=[f"{n}" for n in range(1500)])
        ad.AnnData(np.ones((1500, 3), np.float32), obs=obs).write_h5ad(tmp_path / "scores.h5ad")
        found = measured(
            open_collection(tmp_path, obs=["score"]), Configuration(block_size=8, fetch_factor=4),
            batch_size=16, label="score",
        )  # fmt: skip
        codes = [-1 if np.isnan(value) else code for code, value in enumerate(values)]
        planned = planned_bits(np.repeat(codes, 500), 8, 4, batch_size=16)
        seen = found.round_entropy_bits["score"][: planned.size]
        assert seen == pytest.approx(planned[: len(seen)])

    def test_a_training_step_goes_on_while_the_next_fetch_is_read(self, collection):
        step, fetch_factor = 0.002, 8
        request = request_of(
            Configuration(block_size=16, fetch_factor=fetch_factor), batch_size=BATCH_SIZE,
            step_seconds=step,
        )  # fmt: skip
        found = measure_with(MeasuringHere(collection), request, limit_seconds=600.0)
        assert found.waiting_share is not None
        computing = np.subtract(found.round_seconds, found.round_waiting_seconds)
        # What a step overslept, the next one makes up for, at most half a step.
        assert min(computing) >= step * (fetch_factor - 0.5)
        assert 0 <= found.waiting_share.value < 1

    def test_rows_of_a_selection_are_read(self, collection):
        rows = np.arange(1000, 2000)
        strategy = BlockShuffling(4, indices=rows)
        found = measured(collection, Configuration(block_size=4, fetch_factor=2), strategy=strategy)
        assert found.sampled
        assert {cell.row for cell in found.sampled} <= set(rows.tolist())

    @pytest.mark.parametrize("num_workers", HERE_AND_WITH_A_WORKER)
    def test_what_is_read_is_counted(self, tmp_path, num_workers):
        """A matrix without chunks, of which exactly the rows are read."""
        n_vars, X = 1_000, np.ones((20_000, 1_000), dtype=np.float32)
        ad.AnnData(X, obs=pd.DataFrame(index=[f"{n}" for n in range(len(X))])).write_h5ad(
            tmp_path / "dense.h5ad"
        )
        collection = open_collection(tmp_path)
        configuration = Configuration(block_size=64, fetch_factor=8, num_workers=num_workers)
        found = measured(collection, configuration, batch_size=64, cache="warm", seconds=0.1)
        # One fetch more or less may have been read ahead when the first of them began.
        one_fetch = 1 / len(found.round_reads)
        read = found.bytes_read_per_cell
        assert read.asked == pytest.approx(4 * n_vars, rel=one_fetch + 0.05)
        assert read.from_storage == 0
        assert collection.stored_row_bytes() == 4 * n_vars

    def test_the_size_of_a_minibatch_is_that_of_cells_and_controls(self, collection):
        """What waits for a slow training loop takes this much memory."""
        first = collection.obs["cell_type"].categories[0]
        strategy = MatchedControls(BlockShuffling(4), "cell_type", first, ["plate"], k=2)
        pairs = next(iter(CellDataset(collection, strategy, 8, 2, seed=0)))
        size_of = object.__new__(DatasetSession).size_of
        alone = replace(pairs, controls=None)
        assert size_of(alone) >= 4 * pairs.X.values().numel()
        assert size_of(pairs) == size_of(alone) + size_of(pairs.controls)
        assert size_of(replace(alone, neighbors=pairs.controls)) == size_of(pairs)

    @pytest.mark.parametrize(
        ("settings", "error", "said"),
        [
            ({"fetch_factor": 47}, ParameterError, r"needs 1,504 cells, but there are 1,500"),
            ({"label": "plate"}, ColumnError, "without the obs column 'plate'"),
        ],
    )
    def test_what_cannot_be_measured_is_refused(self, one_file, settings, error, said):
        configuration = Configuration(block_size=1, fetch_factor=settings.pop("fetch_factor", 1))
        with pytest.raises(error, match=said):
            measured(one_file, configuration, **settings)

    @pytest.mark.parametrize(
        ("open_loader", "fetch_factor", "said"),
        [
            (partial(range, 3), 4, r"has 3 minibatches, but .* needs 4 to be timed"),
            (partial(EndsEarly, range(5)), 1, r"ended early: it should have 5 minibatches"),
        ],
    )
    def test_a_loader_that_is_too_short(self, open_loader, fetch_factor, said):
        with pytest.raises(ParameterError, match=said):
            measure(Opened(open_loader), Configuration(block_size=1, fetch_factor=fetch_factor))

    def test_any_loader_may_be_slow_or_fail(self):
        """A slow one has the time for the least number of rounds, longer than it was given."""
        slow = measure(Opened(partial(slowly, 20, 0.01)), Configuration(), seconds=0.01)
        assert slow.status == "timed"
        failed = measure(Opened(partial(Fails, range(3))), Configuration())
        assert (failed.status, failed.failure) == ("failed", "no minibatch here")

    def test_files_whose_pages_stay_are_not_called_cold(self, collection, monkeypatch):
        cases: Any = ((None, "cold"), (0.5, "cold"), (0.5, "warm"))
        for resident, asked in cases:
            monkeypatch.setattr(_page_cache, "resident_fraction", lambda _, share=resident: share)
            assert _page_cache.prepare_cache(collection.files, asked) == "unknown"


def of_rounds(*seconds, **more):
    return Measurement(
        configuration=Configuration(), cache="cold", cells_per_round=100, round_seconds=seconds,
        peak_memory_bytes=len(seconds), **more,
    )  # fmt: skip


class TestFigures:
    @pytest.mark.parametrize(
        ("n", "status", "has_speed"),
        [
            (0, "too long", False),
            (FEWEST_ROUNDS - 1, "timed", False),
            (FEWEST_ROUNDS, "timed", True),
        ],
    )
    def test_a_throughput_needs_some_rounds(self, n, status, has_speed):
        found = of_rounds(*[0.1] * n)
        assert (found.status, found.cells_per_second is not None) == (status, has_speed)
        if has_speed:  # also where all are alike
            speed = found.cells_per_second
            assert speed.low <= speed.value <= speed.high

    def test_the_interval_of_one_process_is_that_of_batches_of_its_rounds(self):
        """Four batches of two, with Student's t of three degrees of freedom, in logarithms."""
        speed = of_rounds(1.0, 1.2, 1.1, 1.1, 1.4, 1.4, 1.2, 1.2).cells_per_second
        batches = np.array([1.1, 1.1, 1.4, 1.2])
        times = np.exp(3.182446 * batches.std(ddof=1) / batches.mean() / 2)
        expected = np.array([1, 1 / times, times]) * 100 / 1.2
        assert [speed.value, speed.low, speed.high] == pytest.approx(expected)
        # It may reach beyond the fastest round.
        assert of_rounds(1.0, 1.0, 1.0, 1.5).cells_per_second.high > 100 / 1.0

    def test_pooling_joins_samples_and_keeps_the_highest_peak(self):
        found = pooled([of_rounds(1.0, 2.0), of_rounds(3.0, 4.0, 5.0)])
        assert found.round_seconds == (1.0, 2.0, 3.0, 4.0, 5.0)
        assert found.replicate_seconds == (1.5, 4.0)
        assert found.peak_memory_bytes == 3
        failed = of_rounds(failure="the process was killed")  # after enough rounds
        assert pooled([of_rounds(*[1.0] * LEAST_ROUNDS), failed]).status == "failed"

    @pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
    def test_sizes_below_their_least_are_refused(self, sizes):
        names = ("block_size", "fetch_factor", "num_workers")
        with pytest.raises(ParameterError, match="must hold"):
            Configuration(**dict(zip(names, sizes, strict=True)))


def killed_worker(_number):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_loader(num_workers):
    if not num_workers:
        killed_worker(0)
    rows: Any = range(64)
    return DataLoader(rows, num_workers=num_workers, worker_init_fn=killed_worker)


@pytest.mark.process
class TestProcess:
    def test_a_dataset_is_measured(self, small_collection):
        collection = open_collection(small_collection)
        open_loader = partial(
            CellDataset, collection, BlockShuffling(4), BATCH_SIZE, fetch_factor=8, drop_last=True
        )
        loader = Opened(open_loader, files=collection.files, batch_size=BATCH_SIZE)
        found = measure(loader, Configuration(block_size=4, fetch_factor=8), seconds=0.1)
        assert found.status == "timed"
        assert found.cells_per_second is not None
        assert found.peak_memory_bytes > 10_000_000

    def test_a_worker_that_fails(self):
        rows: Any = range(64)
        open_it = partial(DataLoader, rows, num_workers=1, collate_fn=collate_nothing)
        found = measure(Opened(open_it), Configuration(num_workers=1))
        assert found.failure == "in a worker: ValueError: no collation here"

    @pytest.mark.parametrize(
        ("num_workers", "who"), [(0, "the process was killed"), (1, "DataLoader worker")]
    )
    def test_what_is_killed_fails(self, num_workers, who):
        open_it = partial(killed_loader, num_workers)
        found = measure(Opened(open_it), Configuration(num_workers=num_workers), seconds=1.0)
        assert found.status == "failed"
        assert who in found.failure

    def test_a_damaged_file_is_named(self, small_collection, tmp_path):
        path = Path(shutil.copy(small_collection / "plate0.h5ad", tmp_path / "damaged.h5ad"))
        collection = open_collection(path)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(FormatError, match=r"damaged\.h5ad"):
            measure(collection, Configuration(block_size=1, fetch_factor=1), seconds=0.1)

    def test_a_loader_that_cannot_be_sent_is_one_line(self):
        with pytest.raises(ParameterError, match=r"cannot be sent to the measuring.*define it"):
            measure(Unpicklable(), Configuration(block_size=1, fetch_factor=1))

    def test_one_that_dies_is_one_line(self, collection):
        with MeasuringProcess(collection) as process:
            process.start()
            process._process.kill()
            with pytest.raises(MeasuringError, match="died, perhaps for want of memory"):
                process.start()

    def test_one_that_does_not_start_is_one_line(self, collection, monkeypatch):
        monkeypatch.setattr("cellfeed_tuner._measuring._process.START_SECONDS", 0.0)
        said = "has not answered for 0 s; close other"
        with MeasuringProcess(collection) as process, pytest.raises(MeasuringError, match=said):
            process.start()

    def test_it_ends_with_its_parent(self, small_collection):
        script = (
            "import os, time\n"
            "from cellfeed import open_collection\n"
            "from cellfeed_tuner._measuring._process import MeasuringProcess\n"
            f"process = MeasuringProcess(open_collection({str(small_collection)!r})).__enter__()\n"
            "process.start()\n"
            "print(process._process.pid, flush=True)\n"
            "os.kill(os.getpid(), 9)\n"
        )
        killed = warm.run([sys.executable, "-c", script])
        orphan = int(killed.stdout)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(orphan).wait(timeout=600)
        assert not psutil.pid_exists(orphan)
        assert killed.stderr == ""

    def test_long_measurements_keep_no_minibatches(self, collection):
        """Of a minibatch from a worker, rows alone must not keep the expression alive."""
        dataset = CellDataset(collection, BlockShuffling(8), batch_size=32, fetch_factor=2, seed=0)
        descriptors = Path("/proc/self/fd")
        if not descriptors.is_dir():
            pytest.skip("this system does not list open files")
        before = len(list(descriptors.iterdir()))
        kept = [(batch.rows, batch.obs["plate"]) for batch in dataset.loader(1)]
        assert len(kept) == len(dataset) > 100
        assert len(list(descriptors.iterdir())) < before + 20


def sleeping_child():
    """Start a process that sleeps."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


def starting_more(ready):
    """Start one process after the other, each by the last; some, so that it ends all the same."""
    for number in range(200):
        if number == 10:
            os.write(ready, b"x")
        if os.fork():
            time.sleep(600)
            os._exit(0)


def with_an_orphan(ready):
    """Start a process whose parent has ended."""
    parent = os.fork()
    if parent == 0:
        sleeping_child()
        os._exit(0)
    os.waitpid(parent, 0)
    os.write(ready, b"x")
    time.sleep(600)


@pytest.mark.process
class TestKilling:
    """Nothing that a killed process has started goes on, even what it was starting."""

    @pytest.mark.parametrize("start", [starting_more, with_an_orphan])
    def test_nothing_goes_on(self, start):
        # All hold the other end of a pipe, which ends with the last of them.
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                start(sender)
            finally:
                os._exit(0)
        os.close(sender)
        assert os.read(receiver, 1) == b"x"
        kill_tree(pid)
        os.waitpid(pid, 0)
        ready, _, _ = select.select([receiver], [], [], 300.0)
        assert ready
        assert os.read(receiver, 1) == b""
        os.close(receiver)

    def test_what_leads_no_group_is_killed_without_its_group(self):
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        kill_tree(pid)
        assert os.waitpid(pid, 0)[1] == 9
        kill_tree(pid)  # of what is gone, nothing is left to kill
        assert not psutil.pid_exists(pid)
