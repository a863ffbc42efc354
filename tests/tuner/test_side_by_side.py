"""Ranks are measured side by side, each with its part of an epoch, as one measurement."""

import os
from dataclasses import replace
from functools import partial

import numpy as np
import psutil
import pytest
from tests.tuner import ranked_loaders
from tests.tuner.ranked_loaders import EndsEarly, Numbers, Unequal

from cellfeed import BlockShuffling, EpochPlan, ParameterError, open_collection
from cellfeed.machine import usable_cpu_count
from cellfeed_tuner import Configuration, Ranks, minibatch_entropies
from cellfeed_tuner._measuring._measurement import measure_with
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import Round, TimingRequest

pytestmark = pytest.mark.process

BATCH_SIZE, SEED = 32, 3
CONFIGURATION = Configuration(block_size=16, fetch_factor=4)
TWO = Ranks(n_local=2, n_total=2)


def request_of(configuration=CONFIGURATION, *, ranks=TWO, step=None, labels=(), **settings):
    return TimingRequest(
        configuration=configuration, batch_size=BATCH_SIZE, labels=labels, cache="warm", seed=SEED,
        least_rounds=8, most_rounds=8, seconds=0.0, step=step, ranks=ranks,
        **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def collection(small_collection):
    return open_collection(small_collection, obs=["plate"])


@pytest.fixture(scope="module")
def process(collection):
    with MeasuringProcess(collection) as process:
        process.start()
        yield process


def measured(process, request):
    return measure_with(process, request, limit_seconds=600.0)


def plan(rank, collection):
    return EpochPlan(
        strategy=BlockShuffling(16), n_rows=len(collection), batch_size=BATCH_SIZE,
        fetch_factor=4, seed=SEED, rank=rank, world_size=2,
    )  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_are_those_of_the_plan_of_each_rank(process, collection, num_workers, tmp_path):
    configuration = CONFIGURATION.changed(num_workers=num_workers)
    step = partial(ranked_loaders.note_rows, folder=str(tmp_path))
    outcome = process.run(request_of(configuration, step=step), limit_seconds=600.0)
    assert outcome.failure is None
    n_rounds = sum(isinstance(each, Round) for each in outcome.events)
    noted = [np.loadtxt(tmp_path / f"{rank}.rows", dtype=np.int64) for rank in range(2)]
    per_epoch = plan(0, collection).n_whole_fetches * 4
    for rank, of_rank in enumerate(noted):
        assert len(of_rank) == 4 * n_rounds
        rows = of_rank[:per_epoch, 2:]
        planned = plan(rank, collection).delivered_rows(0, len(rows) // 4)
        assert np.array_equal(rows.ravel(), planned.ravel())
        # At no time is one of them more than a round ahead.
        assert np.abs(of_rank[:, 0] - of_rank[:, 1]).max() <= 4 + 1
    first, second = (set(of_rank[:per_epoch, 2:].ravel().tolist()) for of_rank in noted)
    assert not first & second


def test_cells_are_those_of_all_ranks(process, collection):
    before = dict(os.environ)
    found = measured(process, request_of(labels=["plate"]))
    assert before == dict(os.environ)
    assert found.status == "timed"
    assert found.delivery_fault == ""
    assert found.cells_per_round == 2 * 4 * BATCH_SIZE
    mean = np.mean(found.round_seconds)
    assert found.cells_per_second.value == pytest.approx(found.cells_per_round / mean, rel=0.5)
    assert {cell.row for cell in found.sampled}
    bits = [
        minibatch_entropies(collection.obs["plate"].values, plan(rank, collection))
        for rank in range(2)
    ]
    by_round = np.mean(bits, axis=0)[: plan(0, collection).n_whole_fetches * 4].reshape(-1, 4)
    seen = np.array(found.round_entropy_bits["plate"])[: len(by_round)]
    assert seen == pytest.approx(by_round.mean(axis=1)[: seen.size])


def test_each_has_its_share_of_the_cores(process, tmp_path):
    step = partial(ranked_loaders.note_threads, folder=str(tmp_path))
    for n in (1, 2, 3):
        ranks = Ranks(n_local=n, n_total=max(2, n))
        assert not measured(process, request_of(ranks=ranks, step=step)).failure
        for rank in range(n):
            threads = int((tmp_path / f"{rank}.threads").read_text())
            assert threads == max(1, usable_cpu_count() // n)


def test_one_rank_by_itself_has_all_cores(collection, tmp_path, monkeypatch):
    step = partial(ranked_loaders.note_threads, folder=str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with MeasuringProcess(collection) as process:
        process.start()
        assert not measured(process, request_of(ranks=Ranks(), step=step)).failure
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert int((tmp_path / "0.threads").read_text()) == usable_cpu_count()


def test_memory_is_that_of_all(process):
    n_bytes = 200_000_000
    step = partial(ranked_loaders.large_step, n_bytes=n_bytes)
    alone, both = (
        measured(process, request_of(ranks=Ranks(n_local=n, n_total=2), step=step)) for n in (1, 2)
    )
    assert both.peak_memory_bytes > alone.peak_memory_bytes + 0.9 * n_bytes


def test_a_rank_that_is_killed_is_named_and_nothing_stays(process, tmp_path):
    step = partial(ranked_loaders.killed_step, folder=str(tmp_path))
    found = measured(process, request_of(step=step))
    assert found.failure == "the process of rank 1 was killed, perhaps for want of memory"
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert pids
    assert not any(map(psutil.pid_exists, pids))
    found = measured(
        process, request_of(step=ranked_loaders.failing_step)
    )  # on one, which ends all
    assert found.failure == "no such layer"


class TestOtherLoaders:
    @staticmethod
    def run(tunable):
        """They know their rank from the environment."""
        request = request_of(Configuration(fetch_factor=2), labels=["half"])
        request = replace(request, batch_size=ranked_loaders.BATCH_SIZE)
        with MeasuringProcess(tunable) as process:
            process.start()
            return measured(process, request)

    def test_cells_are_those_of_all_ranks(self):
        found = self.run(Numbers())
        assert found.status == "timed"
        assert found.cells_per_round == 2 * 2 * ranked_loaders.BATCH_SIZE

    @pytest.mark.parametrize(
        ("loader", "said"),
        [
            (Unequal, r"an epoch has \[18, 20\] rounds .* on ranks 0"),
            (EndsEarly, "the loader ended early:"),
        ],
    )
    def test_epochs_of_different_lengths_are_refused(self, loader, said):
        with pytest.raises(ParameterError, match=said):
            self.run(loader())
