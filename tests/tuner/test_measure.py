"""Measuring in a process of its own."""

import contextlib
import importlib
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import anndata as ad
import numpy as np
import pandas as pd
import psutil
import pytest
from tests.tuner.other_loaders import EndsEarly, Fails, Opened, collate_nothing, slowly
from tests.warm import python as warm
from torch.utils.data import DataLoader

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    EpochPlan,
    FormatError,
    ParameterError,
    Streaming,
    open_collection,
)
from cellfeed_tuner import (
    Configuration,
    measure,
    minibatch_entropies,
)
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS, measure_with
from cellfeed_tuner._measuring._page_cache import (
    FETCHES_PREFETCHED,
    drop_pages,
    prepare_cache,
    resident_fraction,
)
from cellfeed_tuner._measuring._process import MeasuringError, MeasuringProcess
from cellfeed_tuner._measuring._timing import Round, TimingRequest
from cellfeed_tuner._subject import LabelWithin, label_codes

BATCH_SIZE = 32


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rounds_are_whole_fetches_of_the_plan(small_collection, num_workers):
    collection = open_collection(small_collection, obs=["plate", "cell_type"])
    configuration = Configuration(block_size=16, fetch_factor=4, num_workers=num_workers)
    labels = ["plate", "cell_type"]
    measured = measure(
        collection, configuration, batch_size=BATCH_SIZE, label=labels, seconds=0.1, seed=3
    )
    assert measured.status == "measured"
    assert measured.cells_per_round == 4 * BATCH_SIZE
    assert len(measured.round_seconds) >= LEAST_ROUNDS
    assert measured.cells_per_second is not None
    speed = measured.cells_per_second
    assert speed.low <= speed.value <= speed.high
    assert measured.first_minibatch_seconds is not None
    assert measured.peak_memory_bytes > 10_000_000
    # What came out is what the plan says, from the first fetch on.
    plan = EpochPlan(
        strategy=BlockShuffling(16),
        n_rows=len(collection),
        batch_size=BATCH_SIZE,
        fetch_factor=4,
        seed=3,
    )
    for label in labels:
        planned = minibatch_entropies(collection.obs[label].values, plan)
        by_fetch = planned[: plan.n_whole_fetches * 4].reshape(-1, 4).mean(axis=1)
        seen = np.array(measured.round_entropy_bits[label][: by_fetch.size])
        assert seen == pytest.approx(by_fetch[: seen.size])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_another_strategy_is_measured_as_it_is_planned(small_collection, num_workers):
    collection = open_collection(small_collection, obs=["cell_type"])
    configuration = Configuration(block_size=1, fetch_factor=4, num_workers=num_workers)
    measured = measure(
        collection, configuration, strategy=Streaming(), batch_size=BATCH_SIZE, label="cell_type",
        seconds=0.1,
    )  # fmt: skip
    assert measured.status == "measured"
    assert measured.delivery_fault == ""
    # Cells of a type lie together: in storage order, whole minibatches are of one type or two.
    codes = label_codes(collection, "cell_type")[: len(collection) // 128 * 128]
    types = [len(set(each)) for each in codes.reshape(-1, BATCH_SIZE)]
    bits = np.array(measured.round_entropy_bits["cell_type"])[: len(types) // 4]
    is_mixed = np.array(types).reshape(-1, 4).max(axis=1)[: bits.size] > 1
    assert np.array_equal(bits > 0, is_mixed)


def request_of(configuration, *, step=None, cache="warm"):
    """The least that can be asked of any loader."""
    return TimingRequest(
        configuration=configuration, batch_size=1, labels=(), cache=cache, seed=0, seconds=0.0,
        least_rounds=LEAST_ROUNDS, most_rounds=LEAST_ROUNDS, step=step,
    )  # fmt: skip


class TestAnyLoader:
    def test_a_dataset_is_measured(self, small_collection):
        collection = open_collection(small_collection)
        open_loader = partial(
            CellDataset, collection, BlockShuffling(4), BATCH_SIZE, fetch_factor=8, drop_last=True
        )
        measured = measure(
            Opened(open_loader, files=collection.files, batch_size=BATCH_SIZE),
            Configuration(block_size=4, fetch_factor=8),
            seconds=0.1,
        )
        assert measured.status == "measured"
        assert measured.cells_per_second is not None

    def test_whole_fetches_of_one_epoch_after_the_other(self):
        """Of five minibatches, two fetches of two are timed in each epoch."""
        taken, events = list[int](), list[object]()
        request = request_of(Configuration(fetch_factor=2), step=taken.append)
        request.run(Opened(partial(range, 5)), events.append)
        n_rounds = sum(isinstance(each, Round) for each in events)
        assert n_rounds == 1 + LEAST_ROUNDS
        assert taken == ([0, 1, 2, 3] * n_rounds)[: 2 * n_rounds]

    def test_every_epoch_begins_with_files_that_are_not_cached(self, tmp_path):
        file = tmp_path / "data"
        file.write_bytes(bytes(1 << 20))
        drop_pages([file])
        if resident_fraction([file]) != 0:
            pytest.skip("pages of this file system cannot be dropped")
        resident = list[float | None]()

        def read(_):
            resident.append(resident_fraction([file]))
            file.read_bytes()

        request = request_of(Configuration(), step=read, cache="cold")
        request.run(Opened(partial(range, 1), files=[file]), list[object]().append)
        assert resident == [0.0] * (1 + LEAST_ROUNDS)

    def test_an_epoch_shorter_than_a_fetch(self):
        configuration = Configuration(block_size=1, fetch_factor=4)
        with pytest.raises(ParameterError, match=r"has 3 minibatches, but .* needs 4 to be timed"):
            measure(Opened(partial(range, 3)), configuration)

    def test_a_loader_that_ends_early(self):
        request = request_of(Configuration())
        with pytest.raises(ParameterError, match=r"ended early: it should have 5 minibatches"):
            request.run(Opened(partial(EndsEarly, range(5))), list[object]().append)

    def test_a_slow_loader_has_the_time_for_the_least_number_of_rounds(self):
        """Which is much longer than it was given."""
        measured = measure(Opened(partial(slowly, 20, 0.05)), Configuration(), seconds=0.01)
        assert measured.status == "measured"

    def test_a_loader_that_fails(self):
        measured = measure(Opened(partial(Fails, range(3))), Configuration())
        assert measured.status == "failed"
        assert "no minibatch here" in measured.failure

    def test_a_worker_that_fails(self):
        open_it = partial(
            DataLoader, cast("Any", range(64)), num_workers=1, collate_fn=collate_nothing
        )
        measured = measure(Opened(open_it), Configuration(num_workers=1))
        assert measured.note == "in a worker: ValueError: no collation here"


class TestAKilledProcess:
    """What is killed is tried once more, by a loader that is killed as often as it is told."""

    @pytest.fixture(params=["process", "worker"])
    def measure_killed(self, request, tmp_path, monkeypatch):
        """Returns a function that measures such a loader."""
        (tmp_path / "killed.py").write_text(
            "import os, signal, time\n"
            "from pathlib import Path\n"
            "from torch.utils.data import DataLoader\n"
            "\n"
            "def open_loader(folder, n_times, n_workers):\n"
            "    def die(_=None):\n"
            "        n = len(list(Path(folder).iterdir()))\n"
            "        if n < n_times:\n"
            "            (Path(folder) / str(n)).touch()\n"
            "            os.kill(os.getpid(), signal.SIGKILL)\n"
            "    if not n_workers:\n"
            "        die()\n"
            "    return DataLoader(range(64), num_workers=n_workers, worker_init_fn=die)\n"
        )
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH')}")
        monkeypatch.syspath_prepend(tmp_path)
        counted = tmp_path / "counted"
        counted.mkdir()
        n_workers = int(request.param == "worker")

        def measure_it(n_times):
            open_loader = importlib.import_module("killed").open_loader
            open_it = partial(open_loader, str(counted), n_times, n_workers)
            return measure(Opened(open_it), Configuration(num_workers=n_workers), seconds=1.0)

        yield measure_it
        sys.modules.pop("killed", None)

    def test_it_is_measured_at_the_second_try(self, measure_killed):
        measured = measure_killed(1)
        assert measured.status == "measured"
        assert measured.failure == ""
        assert measured.n_killed == 1
        assert measured.note == "killed once, perhaps for want of memory, and tried again"

    def test_killed_twice_it_has_failed(self, measure_killed):
        measured = measure_killed(2)
        assert measured.status == "failed"
        assert measured.n_killed == 2
        assert measured.failure
        assert measured.note == f"{measured.failure} (killed twice)"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_read_is_counted(tmp_path, num_workers):
    """A matrix without chunks, of which exactly the rows are read."""
    n_rows, n_vars = 20_000, 1_000
    X = np.ones((n_rows, n_vars), dtype=np.float32)
    ad.AnnData(X, obs=pd.DataFrame(index=[f"{i}" for i in range(n_rows)])).write_h5ad(
        tmp_path / "dense.h5ad"
    )
    collection = open_collection(tmp_path)
    configuration = Configuration(block_size=64, fetch_factor=8, num_workers=num_workers)
    measured = measure(collection, configuration, cache="warm", seconds=0.1)
    assert measured.bytes_read_per_cell is not None
    # One fetch more or less may have been read ahead when the first of them began.
    one_fetch = 1 / len(measured.round_reads)
    assert measured.bytes_read_per_cell.asked == pytest.approx(4 * n_vars, rel=one_fetch + 0.05)
    assert measured.bytes_read_per_cell.from_storage == 0
    assert collection.stored_row_bytes() == 4 * n_vars


def test_nothing_is_said_of_reads_where_an_epoch_is_too_short(small_collection):
    collection = open_collection(small_collection / "plate0.h5ad")
    configuration = Configuration(block_size=16, fetch_factor=16)
    measured = measure(collection, configuration, batch_size=BATCH_SIZE, seconds=0.1)
    assert measured.status == "measured"
    assert measured.bytes_read_per_cell is None


def test_a_training_step_goes_on_while_the_next_fetch_is_read(small_collection):
    collection = open_collection(small_collection)
    step, fetch_factor = 0.002, 8
    request = TimingRequest(
        configuration=Configuration(block_size=16, fetch_factor=fetch_factor),
        batch_size=BATCH_SIZE,
        labels=(),
        cache="warm",
        seconds=0.0,
        least_rounds=LEAST_ROUNDS,
        most_rounds=LEAST_ROUNDS,
        seed=0,
        step_seconds=step,
    )
    with MeasuringProcess(collection) as process:
        process.start()
        measured = measure_with(process, request, limit_seconds=600.0)
    computing = np.subtract(measured.round_seconds, measured.round_waiting_seconds)
    assert measured.status == "measured"
    # What a step overslept, the next one makes up for, at most half a step.
    assert min(computing) >= step * (fetch_factor - 0.5)
    assert measured.waiting_share is not None
    assert 0 <= measured.waiting_share.value < 1


def test_a_label_is_measured_within_another(small_collection):
    collection = open_collection(small_collection, obs=["plate", "cell_type"])
    configuration = Configuration(block_size=4, fetch_factor=8)
    request = TimingRequest(
        configuration=configuration,
        batch_size=BATCH_SIZE,
        labels=("cell_type",),
        given="plate",
        cache="warm",
        seed=0,
        least_rounds=LEAST_ROUNDS,
        most_rounds=LEAST_ROUNDS,
        number=2,
    )
    with MeasuringProcess(collection) as process:
        process.start()
        measured = measure_with(process, request, limit_seconds=600.0)
    plan = EpochPlan(
        strategy=BlockShuffling(4), n_rows=len(collection), batch_size=BATCH_SIZE, fetch_factor=8,
        seed=0, epoch=request.first_epoch,
    )  # fmt: skip
    label, given = (label_codes(collection, name) for name in ("cell_type", "plate"))
    joint = 1000 * label.astype(np.int64) + given
    by_chain_rule = minibatch_entropies(joint, plan) - minibatch_entropies(given, plan)
    seen = measured.round_entropy_bits[LabelWithin("cell_type", "plate")]
    assert len(seen) == FETCHES_PREFETCHED + LEAST_ROUNDS  # the first go into new memory
    first = by_chain_rule[: 8 * plan.n_whole_fetches].reshape(-1, 8).mean(axis=1)[: len(seen)]
    assert np.array(seen[: first.size]) == pytest.approx(first)


def test_a_short_epoch_is_followed_by_the_next(small_collection):
    collection = open_collection(small_collection / "plate0.h5ad", obs=["cell_type"])
    configuration = Configuration(block_size=16, fetch_factor=32)  # one whole fetch to an epoch
    measured = measure(
        collection, configuration, batch_size=BATCH_SIZE, label="cell_type", seconds=0.1
    )
    assert len(measured.round_seconds) >= LEAST_ROUNDS
    assert len(set(measured.round_entropy_bits["cell_type"])) > 1  # each epoch in another order


def test_too_few_cells_for_whole_fetches_are_refused(small_collection):
    collection = open_collection(small_collection / "plate0.h5ad")
    with pytest.raises(ParameterError, match=r"needs 2,048 cells, but there are 1,500"):
        measure(collection, Configuration(block_size=1, fetch_factor=32), batch_size=64)


def test_a_label_that_was_not_opened_is_refused(small_collection):
    collection = open_collection(small_collection)
    with pytest.raises(ColumnError, match="without the obs column 'plate'"):
        measure(collection, Configuration(block_size=1, fetch_factor=1), label="plate")


def test_a_damaged_file_is_named(small_collection, tmp_path):
    path = tmp_path / "damaged.h5ad"
    shutil.copy(small_collection / "plate0.h5ad", path)
    collection = open_collection(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(FormatError, match=r"damaged\.h5ad"):
        measure(collection, Configuration(block_size=1, fetch_factor=1), seconds=0.1)


@pytest.mark.parametrize("values", [[-3.0, -2.0, -1.0], [0.5, np.nan, 2.0]])
def test_numbers_are_labels_as_they_are_in_theory(tmp_path, values):
    """Negative numbers are no missing codes, and NaN is one."""
    obs = pd.DataFrame({"score": np.repeat(values, 500)}, index=[str(i) for i in range(1500)])
    ad.AnnData(np.ones((1500, 3), dtype=np.float32), obs=obs).write_h5ad(tmp_path / "scores.h5ad")
    collection = open_collection(tmp_path, obs=["score"])
    configuration = Configuration(block_size=8, fetch_factor=4)
    measured = measure(collection, configuration, batch_size=16, label="score", seconds=0.1)
    codes = np.repeat([-1 if np.isnan(value) else code for code, value in enumerate(values)], 500)
    plan = EpochPlan(strategy=BlockShuffling(8), n_rows=1500, batch_size=16, fetch_factor=4)
    planned = minibatch_entropies(codes, plan)[: plan.n_whole_fetches * 4].reshape(-1, 4)
    seen = measured.round_entropy_bits["score"][: len(planned)]
    assert seen == pytest.approx(planned.mean(axis=1)[: len(seen)])


def test_long_measurements_keep_no_minibatches(small_collection):
    """Of a minibatch from a worker, rows alone must not keep the expression alive."""
    collection = open_collection(small_collection, obs=["plate"])
    dataset = CellDataset(collection, BlockShuffling(8), batch_size=32, fetch_factor=2, seed=0)
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("this system does not list open files")
    before = len(list(descriptors.iterdir()))
    kept = [(batch.rows, batch.obs["plate"]) for batch in dataset.loader(1)]
    assert len(kept) == len(dataset) > 100
    assert len(list(descriptors.iterdir())) < before + 20


def test_files_whose_pages_stay_are_not_called_cold(small_collection, monkeypatch):
    collection = open_collection(small_collection)
    monkeypatch.setattr(
        "cellfeed_tuner._measuring._page_cache.resident_fraction", lambda paths: None
    )
    assert prepare_cache(collection.files, "cold") == "unknown"
    monkeypatch.setattr(
        "cellfeed_tuner._measuring._page_cache.resident_fraction", lambda paths: 0.5
    )
    assert prepare_cache(collection.files, "cold") == "unknown"
    assert prepare_cache(collection.files, "warm") == "unknown"


def test_a_measuring_process_that_dies_is_one_line(small_collection):
    collection = open_collection(small_collection)
    with MeasuringProcess(collection) as process:
        process.start()
        process._process.kill()
        with pytest.raises(MeasuringError, match="died, perhaps for want of memory"):
            process.start()


def test_the_measuring_process_ends_with_its_parent(small_collection):
    script = (
        "import os, time\n"
        "from cellfeed import open_collection\n"
        "from cellfeed_tuner._measuring._process import MeasuringProcess\n"
        f"process = MeasuringProcess(open_collection({str(small_collection)!r})).__enter__()\n"
        "process.start()\n"
        "print(process._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script]
    killed = warm.run(command)
    orphan = int(killed.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(orphan).wait(timeout=600)
    assert not psutil.pid_exists(orphan)
    assert killed.stderr == ""
