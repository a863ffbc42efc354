"""A run ends with an answer, in time, whatever takes long."""

from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import pytest
from matplotlib.text import Text
from tests.tuner.reports import in_words
from tests.tuner.simulated import Machine, MeasuringError, autotune_on, timed

from cellfeed import BlockShuffling, MatchedControls, open_collection
from cellfeed_tuner import Configuration, plots
from cellfeed_tuner._measuring._timing import Round
from cellfeed_tuner._time_budget import ANSWER_SECONDS, TimeBudget

BUDGET, SLACK, OVERTIME = 60.0, 2.0, 0.05


def cost(each: Configuration) -> float:
    """Of a disk with a price per block."""
    return 1e-5 + 1e-4 / min(each.block_size, 64 * each.fetch_factor)


def machine_of(*, slower=1.0, overhead=1.0, start_seconds=5.0, **more):
    return Machine(
        lambda each: slower * cost(each), 4500, memory=lambda _: 10**8, overhead=overhead,
        start_seconds=start_seconds, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def collection(small_collection):
    return open_collection(small_collection, obs=["plate"])


@pytest.fixture
def result_on(collection, monkeypatch):
    """Run on a machine, and check that it ends in time; how well it mixes matters little here."""
    monkeypatch.setattr("cellfeed_tuner._mixing.MIXING_ROWS", len(collection))

    def run(machine, *, budget=BUDGET, writing_seconds=0.0, **settings):
        grid = {"block_sizes": (1, 4, 16), "fetch_factors": (1, 8), "workers": (0,)}
        result = autotune_on(
            machine, collection, budget=budget, writing_seconds=writing_seconds, label="plate",
            entropy_floor=0.5, **grid | settings,
        )  # fmt: skip
        # What the command writes afterwards is in it: the answer, and pictures if there is time.
        most = budget + max(SLACK, OVERTIME * budget)
        began = machine.now - result.seconds
        start = machine.asked_at[1] - began  # the first request has code compiled
        assert min(start, budget / 2) + result.seconds - start + ANSWER_SECONDS <= most
        assert result.recommended is not None
        return result

    return run


@pytest.mark.slow
def test_with_time_the_fastest_is_compared_and_looked_at_for_longer(result_on):
    result = result_on(machine_of())
    assert result.recommended.basis == "compared"
    assert result.recommended.configuration.block_size == 16
    assert result.recommended.longest_seconds >= 3
    assert not result.cut_short


def test_a_start_counts_for_half_of_the_budget_at_most():
    now = 0.0
    budget = TimeBudget(BUDGET, lambda: now)
    now = 20.0
    budget.end_start()
    assert (budget.left, budget.left_to_measure) == (BUDGET - 20.0, BUDGET - 22.0)
    now = 100.0
    budget.end_start()
    assert (budget.spent, budget.duration) == (BUDGET / 2, 100.0)
    now = 107.0
    assert (budget.spent, budget.duration) == (BUDGET / 2 + 7.0, 107.0)
    # Where the start took long, so will the answer.
    assert budget.left - budget.left_to_measure == pytest.approx(0.1 * BUDGET)


SLOW = [
    {"start_seconds": 60.0},
    {"start_seconds": 300.0},
    {"slower": 10.0},
    {"slower": 1000.0},
    {"start_seconds": 50.0, "slower": 10.0, "overhead": 10.0},
    {"overhead": 30.0},
]


@pytest.mark.parametrize(
    ("how", "budget"),
    [
        *((how, 60.0) for how in SLOW),
        *((how, 5.0) for how in SLOW[::2]),
        *(pytest.param(how, 600.0, marks=pytest.mark.slow) for how in SLOW[1::2]),
    ],
)
def test_a_slow_machine_gets_an_answer_in_time(result_on, how, budget):
    result_on(machine_of(**how), budget=budget, spent=budget / 4, writing_seconds=2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "budget"),
    [
        ({}, 5.0),
        ({}, 60.0),
        ({"slower": 100.0}, 15.0),
        ({"slower": 1e6, "start_seconds": 1.0}, 5.0),
        ({"slower": 1e6}, 60.0),
        ({"overhead": 9.0}, 15.0),
    ],
)
def test_pairs_with_a_training_step_get_an_answer_in_time(result_on, collection, how, budget):
    """Whether the step was measured or not: that nothing keeps up with it is no reason for none."""
    strategy = MatchedControls(BlockShuffling(4), np.arange(len(collection)) % 3, 0)
    result = result_on(machine_of(**how), budget=budget, strategy=strategy, step=print)
    if how.get("slower") == 1e6:
        assert "no training step had ended after" in result.cut_short


@pytest.mark.parametrize("start_seconds", [BUDGET - 3, BUDGET, 5 * BUDGET])
def test_some_are_timed_however_long_the_start_takes(result_on, start_seconds):
    result = result_on(machine_of(start_seconds=start_seconds, slower=10.0, overhead=3.0))
    assert sum(each.cells_per_second is not None for each in result.configurations) >= 3
    assert result.recommended.basis != "predicted"
    assert not result.cut_short


def test_a_prediction_that_says_nothing_is_not_printed(result_on, monkeypatch):
    monkeypatch.setattr("cellfeed_tuner._searching._search.VAGUE_INTERVAL", 1.01)
    chosen = result_on(machine_of(slower=1e6)).recommended
    assert (chosen.basis, chosen.cells_per_second) == ("predicted", None)


def test_of_a_fetch_that_did_not_end_no_throughput_is_claimed(result_on):
    """Nor of the same sizes with workers: what is known is how long it was waited for."""
    stuck = (16, 8)
    machine = machine_of(factor=lambda each, _: 1e6 if each.plan_settings == stuck else 1.0)
    result = result_on(machine, workers=(0, 1))
    (first,) = (k for k, each in enumerate(machine.asked) if each.plan_settings == stuck)
    waited = machine.asked_at[first + 1] - machine.asked_at[first]
    (late,) = (each for each in result.configurations if each.status == "too long")
    assert late.configuration == Configuration(block_size=16, fetch_factor=8)
    assert late.note == f"no fetch ended in {waited:.1f} s"
    table = result.table().set_index(["block_size", "fetch_factor"])
    assert table.loc[stuck, "cells_per_second"].isna().all()
    assert (table.loc[stuck, "known"] == "").all()
    assert (table.drop(stuck)["known"] != "").all()
    assert f"{late.configuration}: {late.note}." in in_words("untimed", result)
    squares = [text.get_text() for text in plots.autotune_figure(result).findobj(Text)]
    assert "too long" in squares


def test_where_no_fetch_ended_the_expected_throughput_is_unknown(result_on):
    chosen = result_on(machine_of(slower=1e7), budget=15.0).recommended
    assert (chosen.basis, chosen.cells_per_second) == ("predicted", None)
    assert "no fetch ended in time" in chosen.reason


@dataclass
class WithStarts(Machine):
    """Workers take some seconds to start, which the first round has in it."""

    starts: float = 0.0

    def answer(self, request, *arguments):
        found = super().answer(request, *arguments)
        if not request.configuration.num_workers:
            return found
        started, first, *others = found.events
        assert isinstance(first, Round)
        first = replace(first, seconds=first.seconds + self.starts)
        return replace(found, events=(started, first, *others))


@pytest.mark.parametrize("starts", [0.001, 0.7, 3.0])
def test_workers_that_start_longer_than_they_save_in_an_epoch_say_when_they_pay(result_on, starts):
    machine = WithStarts(
        lambda each: cost(each) / (1 + each.num_workers), 4500, memory=lambda _: 10**8,
        starts=starts,
    )  # fmt: skip
    result = result_on(machine, workers=(0, 1))
    chosen, alone = result.recommended, result.without_workers
    assert (chosen.configuration.num_workers, alone.configuration.num_workers) == (1, 0)
    assert chosen.start_seconds == pytest.approx(starts)
    epochs = [4500 / each.cells_per_second.value for each in (alone, chosen)]
    pays = next(n for n in count(1) if n * epochs[0] >= starts + n * epochs[1])
    assert result.epochs_until_workers_paid == pays
    said = " ".join(in_words("workers", result))
    assert bool(said) == (pays > 1)
    if said:
        assert f"take {starts:.1f} s to start and save that in {pays} epochs" in said
        assert f"for fewer epochs, take {alone.configuration}" in said


@pytest.mark.parametrize("step", [None, print])
def test_what_was_timed_is_chosen_however_much_it_varies(result_on, monkeypatch, step):
    monkeypatch.setattr("cellfeed_tuner._searching._search.VAGUE_INTERVAL", 1.0)
    chosen = result_on(machine_of(), budget=60.0, step=step).recommended
    assert chosen.basis != "predicted"
    assert chosen.cells_per_second is not None


@pytest.mark.parametrize("budget", [10.0, 20.0, 35.0])
def test_a_small_budget_is_spent_on_measuring_and_not_exceeded(result_on, budget):
    machine = machine_of(start_seconds=4.0, overhead=0.3)
    result = result_on(machine, budget=budget, spent=2.0, writing_seconds=3.0)
    assert machine.asked
    assert result.recommended.cells_per_second is not None
    assert result.seconds >= budget / 2


def test_pictures_are_left_out_where_they_would_exceed_the_budget():
    now = 0.0
    budget = TimeBudget(BUDGET, lambda: now, writing_seconds=4.0)
    now = BUDGET - 4.0
    assert budget.affords_writing
    now = BUDGET
    assert not budget.affords_writing


@pytest.mark.parametrize("overhead", [1.0, 5.0, 20.0])
def test_never_what_was_cheapest_to_time(result_on, overhead):
    """Single cells, a minibatch at a time, are timed quickly, and slow."""
    result = result_on(machine_of(start_seconds=45.0, slower=100.0, overhead=overhead))
    chosen = result.recommended.configuration
    assert chosen.block_size * chosen.fetch_factor >= 16


def test_a_process_that_dies_leaves_what_was_measured(result_on):
    assert result_on(machine_of(dies_at=6)).cut_short == "the measuring process died"


def test_without_a_measurement_that_is_an_error(result_on):
    with pytest.raises(MeasuringError):
        result_on(machine_of(dies_at=0))


@pytest.mark.slow
def test_a_loader_that_slows_down_is_looked_at_again(result_on):
    """Blocks of 16 are fast for two seconds, and then slower than the others."""
    machine = machine_of()
    usual = machine.answer

    def tiring(request, factor, limit_seconds, _compiling):
        if request.configuration.block_size != 16:
            return usual(request, factor, limit_seconds)
        seconds = request.configuration.minibatches_per_round * 64 * cost(request.configuration)
        rounds, spent = list[float](), 0.0
        while spent < limit_seconds and (spent < request.seconds or len(rounds) < 5):
            rounds.append(seconds if spent < 2 else 20 * seconds)
            spent += rounds[-1]
        machine.now += machine.overhead + spent
        return replace(timed(rounds, n_new=1), peak_memory_bytes=10**8)

    machine.answer = tiring
    assert result_on(machine, budget=240.0).recommended.configuration.block_size == 4
