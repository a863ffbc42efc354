"""What was counted fetch by fetch, and the warning where throughput falls by half."""

import logging
import pickle
from typing import Any

import numpy as np
import pytest

from cellfeed import BlockShuffling, CellDataset, InterleavedDatasets, Statistics
from cellfeed._dataset._statistics import StatisticsHistory
from cellfeed._decode import Counter, Counters

MILLISECOND = 1_000_000


def dataset(**parameters: Any):
    parameters = {"batch_size": 10, "fetch_factor": 5, "seed": 0} | parameters
    return CellDataset(np.arange(1_000), BlockShuffling(4), **parameters)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_is_what_the_statistics_are_fetch_by_fetch(num_workers):
    own = dataset()
    loader = own.loader(num_workers)
    for _ in range(2):
        for _ in loader:
            pass
    found = own.history()
    assert found["n_minibatches"].tolist() == [5] * 40
    assert list(found) == ["time", *(each for each in Statistics.__dataclass_fields__)]
    done = own.statistics()
    assert found["waiting"].sum() == pytest.approx(done.waiting)
    assert 0 < found["training"].sum() <= done.training
    assert found["n_cells"].sum() <= done.n_cells
    assert (np.diff(found["time"]) >= 0).all()


def test_is_empty_before_the_first_fetch():
    assert dataset().history()["waiting"].shape == (0,)


def test_the_last_thousand_are_kept():
    own = dataset(batch_size=1, fetch_factor=1)
    for _ in range(2):
        for _ in own:
            pass
    found = own.history()
    assert found["n_minibatches"].tolist() == [1] * 1000


def test_a_copy_begins_anew():
    own = dataset()
    for _ in own:
        pass
    assert not pickle.loads(pickle.dumps(own)).history()["waiting"].size


def test_of_interleaved_datasets_each_minibatch():
    both = InterleavedDatasets([dataset(), dataset()])
    for _ in both:
        pass
    found = both.history()
    assert found["n_cells"].sum() == 2_000
    assert found["n_minibatches"].tolist() == [1] * 200


class Run:
    """A training whose fetches take as long as is said."""

    def __init__(self):
        self.counters = Counters()
        self.history = StatisticsHistory([self.counters])

    def fetch(self, n=1, *, waiting=1, training=10, **stages):
        """Milliseconds of the training loop, and of stages."""
        for _ in range(n):
            counted = {Counter.WAITING: waiting, Counter.TRAINING: training}
            counted |= {Counter[name.upper()]: each for name, each in stages.items()}
            for counter, each in counted.items():
                self.counters.add(counter, int(each * MILLISECOND))
            self.counters.add(Counter.MINIBATCHES, 1)
            self.counters.add(Counter.CELLS, 64)
            self.history()


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "cellfeed")
    return lambda: [each.message for each in caplog.records]


def test_says_that_throughput_fell_and_which_stage_did_it(run, said):
    run.fetch(600, reading=4, decompressing=20)
    assert not said()
    run.fetch(250, waiting=15, reading=40, decompressing=22)
    (line,) = said()
    assert line == (
        "throughput has fallen by half: 2,560 cells/s in the last 56 fetches, 5,818 before; "
        "training waits 60% of the time; what takes longer is reading: 625.0 us per cell, 62.5 "
        "before"
    )


def test_is_said_once_and_again_where_it_falls_further(run, said):
    run.fetch(600, reading=4)
    run.fetch(1000, waiting=15, reading=40)
    assert len(said()) == 1
    run.fetch(600, waiting=60, reading=99)
    assert len(said()) == 2


def test_training_that_takes_longer_is_no_fault_of_loading(run, said):
    run.fetch(600)
    run.fetch(600, training=40, waiting=2)
    assert not said()


def test_a_few_slow_fetches_are_nothing(run, said):
    for _ in range(30):
        run.fetch(100)
        run.fetch(8, waiting=1_000)
    assert not said()


def test_no_stage_may_be_to_blame(run, said):
    run.fetch(600, decompressing=20)
    run.fetch(300, waiting=15, decompressing=20)
    assert said()[0].endswith("training waits 60% of the time; no stage takes longer")


def test_a_short_run_is_not_judged(run, said):
    run.fetch(30)
    run.fetch(30, waiting=100)
    assert not said()


def test_fast_fetches_are_compared_too(run, said):
    run.fetch(2000, waiting=0.1, training=0.1, reading=0.1)
    run.fetch(800, waiting=0.5, training=0.1, reading=0.8)
    assert len(said()) == 1
