"""Whether a loader delivers its plan: every row is compared, and each way to fail is told."""

from dataclasses import replace

import numpy as np
import pytest

from cellfeed import BlockShuffling, CellDataset, EpochPlan, open_collection
from cellfeed_tuner import Configuration
from cellfeed_tuner._measuring._delivery import delivery_fault, planned_round
from cellfeed_tuner._measuring._timing import Findings, TimingRequest

BATCH_SIZE = 32


def plan_of(configuration, n_rows=4500, seed=0, epoch=5):
    return EpochPlan(
        strategy=BlockShuffling(configuration.block_size),
        n_rows=n_rows,
        batch_size=BATCH_SIZE,
        fetch_factor=configuration.fetch_factor,
        seed=seed,
        epoch=epoch,
    )


def planned_minibatches(configuration, n_rounds, plan=None):
    """All minibatches of so many rounds, over as many epochs as that takes."""
    plan = plan or plan_of(configuration)
    per_epoch = configuration.rounds_per_epoch(plan)
    rounds = [
        planned_round(
            replace(plan, epoch=plan.epoch + number // per_epoch), configuration, number % per_epoch
        )
        for number in range(n_rounds)
    ]
    return list(np.concatenate(rounds))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_order_is_that_of_a_loader_with_workers(small_collection, workers):
    configuration = Configuration(block_size=16, fetch_factor=4, num_workers=workers)
    dataset = CellDataset(
        open_collection(small_collection), BlockShuffling(16), BATCH_SIZE, 4, seed=0
    )
    dataset.set_epoch(5)
    n = configuration.rounds_per_epoch(dataset.plan(epoch=5)) * configuration.minibatches_per_round
    came = [minibatch.rows.numpy() for minibatch in dataset.loader(workers)][:n]
    assert len(came) == n
    assert delivery_fault(came, configuration, dataset.plan(epoch=5)) == ""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("block_size", [1, 16, 300])
def test_what_is_planned_is_no_fault_over_several_epochs(workers, block_size):
    configuration = Configuration(block_size=block_size, fetch_factor=16, num_workers=workers)
    plan = plan_of(configuration)
    n_rounds = 3 * configuration.rounds_per_epoch(plan)
    came = planned_minibatches(configuration, n_rounds)
    assert delivery_fault(came, configuration, plan) == ""


def swapped(came):
    came[70], came[71] = came[71], came[70]


def another_cell(came):
    came[70] = came[70].copy()
    came[70][3] = 4444


def a_short_one(came):
    came[70] = came[70][:-1]


def a_missing_one(came):
    came[70:] = [np.empty(0, dtype=np.int64)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (swapped, "has cell"),
        (another_cell, "has cell 4444 where the plan has"),
        (a_short_one, "has 31 cells in place of 32"),
        (a_missing_one, "has 0 cells in place of 32"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_anything_else_is_told_with_its_place(fault, said, workers):
    configuration = Configuration(block_size=16, fetch_factor=16, num_workers=workers)
    plan = plan_of(configuration)
    came = planned_minibatches(configuration, 12 if workers == 0 else 6)
    fault(came)
    found = delivery_fault(came, configuration, plan)
    per_epoch = configuration.rounds_per_epoch(plan) * configuration.minibatches_per_round
    epochs, minibatch = divmod(70, per_epoch)
    assert found.startswith(f"minibatch {minibatch} of epoch {5 + epochs} ")
    assert said in found


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 6}])
def test_another_seed_or_epoch_is_a_fault(other):
    configuration = Configuration(block_size=16, fetch_factor=16)
    came = planned_minibatches(configuration, 4, replace(plan_of(configuration), **other))
    assert delivery_fault(came, configuration, plan_of(configuration)) != ""


def findings_of(events):
    """The one event that says whether all is as planned."""
    (findings,) = (each for each in events if isinstance(each, Findings))
    return findings


class TestTiming:
    REQUEST = TimingRequest(
        configuration=Configuration(block_size=16, fetch_factor=4),
        batch_size=BATCH_SIZE,
        labels=["plate"],
        cache="warm",
        seconds=0.0,
        least_rounds=4,
        most_rounds=4,
        seed=0,
    )

    def events(self, small_collection):
        events: list[object] = []
        self.REQUEST.run(open_collection(small_collection, obs=["plate"]), events.append)
        return events

    def test_a_loader_that_delivers_its_plan_has_no_fault(self, small_collection):
        events = self.events(small_collection)
        assert findings_of(events).fault == ""
        assert findings_of(events).entropies["plate"].size

    def test_a_loader_that_delivers_another_epoch_is_found_out(self, small_collection, monkeypatch):
        honest = CellDataset.__iter__
        monkeypatch.setattr(
            CellDataset, "__iter__", lambda self: (self.set_epoch(1), honest(self))[1]
        )
        fault = findings_of(self.events(small_collection)).fault
        assert fault.startswith("minibatch 0 of epoch 0 has cell")

    def test_a_loader_that_ends_early_is_found_out(self, small_collection, monkeypatch):
        honest = CellDataset.__iter__

        def first_five(self):
            minibatches = honest(self)
            return (next(minibatches) for _ in range(5))

        monkeypatch.setattr(CellDataset, "__iter__", first_five)
        fault = findings_of(self.events(small_collection)).fault
        assert fault == "minibatch 5 of epoch 0 has 0 cells in place of 32"
