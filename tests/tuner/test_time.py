"""A run ends with an answer, in time, whatever takes long."""

from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import pytest

from cellfeed import BlockShuffling, MatchedControls, open_collection
from cellfeed_tuner import Configuration, Estimate, Ranks
from cellfeed_tuner._measuring._process import MeasuringError, Outcome
from cellfeed_tuner._measuring._timing import Findings, Round, Started, TimingRequest
from cellfeed_tuner._request import collection_request
from cellfeed_tuner._run import Run
from cellfeed_tuner._searching._posterior import Posterior
from cellfeed_tuner._time_budget import TimeBudget, silent

BUDGET = 60.0
SLACK = 15.0


def seconds_per_cell(each: Configuration) -> float:
    """Of a disk with a price per block."""
    return 1e-5 + 1e-4 / min(each.block_size, 64 * each.fetch_factor)


@dataclass
class SlowMachine:
    """A measuring process with a clock of its own, which it turns on.

    It takes ``start_seconds`` to start, ``overhead`` for each replicate, and rounds ``slower`` than
    usual. ``dies_at`` is the replicate at which it dies.
    """

    start_seconds: float = 5.0
    slower: float = 1.0
    overhead: float = 1.0
    dies_at: int | None = None
    now: float = 1000.0
    asked: list[TimingRequest] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def start(self, *, limit_seconds: float) -> None:
        self.now += min(self.start_seconds, limit_seconds)
        if self.start_seconds > limit_seconds:
            raise TimeoutError

    def memory_bytes(self) -> int:
        return 10**8

    def run(self, request: Any, *, limit_seconds: float) -> Outcome:
        if not isinstance(request, TimingRequest):  # a sample for storage advice
            self.others.append(request)
            self.now += limit_seconds
            return Outcome(events=(), peak_memory_bytes=0, failure=None)
        if len(self.asked) == self.dies_at:
            raise MeasuringError("the measuring process died")
        self.asked.append(request)
        each = request.configuration
        seconds = self.slower * each.minibatches_per_round * 64 * seconds_per_cell(each)
        enough = min(request.most_rounds, ceil(request.seconds / seconds))
        wanted = 1 + max(request.least_rounds, enough)
        n_rounds = min(wanted, int(max(0.0, limit_seconds - self.overhead) / seconds))
        took = self.overhead + n_rounds * seconds
        self.now += took if n_rounds == wanted else limit_seconds
        rounds = [Round(seconds, number > 0, 0.0, None) for number in range(n_rounds)]
        events = (Started(0.0, 0.0, 0), *rounds, Findings()) if rounds else ()
        return Outcome(events=events, peak_memory_bytes=10**8, failure=None)


def request_of(collection, **changes):
    asked: dict[str, Any] = {
        "label": "plate", "given": None, "indices": None, "strategy": None, "batch_size": 64,
        "block_sizes": (1, 4, 16), "fetch_factors": (1, 4, 8), "workers": (0,), "num_threads": (),
        "align": (), "cache": None, "budget": BUDGET, "entropy_floor": 0.5, "memory": None,
        "need": None, "step_seconds": None, "step": None, "seed": 0, "sampler": "cost-model",
        "fresh": True, "make_dataset": partial, "ranks": Ranks(), "rank_counts": (),
    }  # fmt: skip
    return collection_request(collection, **asked | changes)


@pytest.fixture
def result_on(small_collection):
    """Run all phases on a machine, after ``spent`` seconds of the budget."""

    def run(machine, *, spent=0.0, writing_seconds=0.0, **changes):
        request = request_of(open_collection(small_collection, obs=["plate"]), **changes)
        began = machine.now
        budget = TimeBudget(
            request.budget, machine.clock, began - spent, writing_seconds=writing_seconds
        )
        run = Run(request=request, process=machine, budget=budget, on_progress=silent)
        run.prepare()
        run.start()
        run.search()
        return run.result(None), spent + machine.now - began

    return run


BEST = min(
    (Configuration(block_size=b, fetch_factor=f) for b in (4, 16) for f in (4, 8)),
    key=seconds_per_cell,
)


def test_with_time_the_fastest_is_compared_and_looked_at_for_longer(result_on):
    result, seconds = result_on(SlowMachine())
    assert result.recommended.basis == "compared"
    assert result.recommended.configuration.block_size == 16
    assert result.recommended.longest_seconds >= 3
    assert seconds <= BUDGET + SLACK
    assert not result.cut_short


@pytest.mark.parametrize(
    "machine",
    [
        SlowMachine(start_seconds=60.0),
        SlowMachine(start_seconds=1e6),
        SlowMachine(slower=10.0),
        SlowMachine(slower=1000.0),
        SlowMachine(start_seconds=50.0, slower=10.0, overhead=10.0),
        SlowMachine(overhead=30.0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("budget", [5.0, 60.0, 600.0])
def test_a_slow_machine_gets_an_answer_in_time(result_on, machine, budget):
    machine.asked.clear()
    result, seconds = result_on(machine, budget=budget, spent=budget / 4, writing_seconds=2.0)
    assert result.recommended is not None
    # What the command writes afterwards is in it.
    assert seconds + 2.0 <= budget + max(SLACK, 0.15 * budget)


@pytest.mark.parametrize(
    "machine",
    [SlowMachine(), SlowMachine(slower=100.0), SlowMachine(slower=1e6), SlowMachine(overhead=9.0)],
    ids=repr,
)
@pytest.mark.parametrize("budget", [5.0, 15.0, 60.0])
def test_pairs_with_a_training_step_get_an_answer_in_time(
    result_on, small_collection, machine, budget
):
    """Whether the step was measured or not: that nothing keeps up with it is no reason for none."""
    machine.asked.clear()
    treatment = np.arange(len(open_collection(small_collection))) % 3
    strategy = MatchedControls(BlockShuffling(4), treatment, 0)
    result, seconds = result_on(machine, budget=budget, strategy=strategy, step=print)
    assert result.recommended is not None
    assert seconds <= budget + max(SLACK, 0.15 * budget)
    if machine.slower > 1e5:
        assert "no training step had ended after" in result.cut_short


def test_what_never_started_is_predicted_and_said_to_be(result_on):
    machine = SlowMachine(start_seconds=1e6)
    result, seconds = result_on(machine)
    chosen = result.recommended
    assert (chosen.basis, chosen.cells_per_second) == ("predicted", None)
    assert chosen.configuration.block_size * chosen.configuration.fetch_factor > 1
    assert "nothing was measured" in chosen.reason
    assert "had not started after" in result.cut_short
    assert not machine.asked
    assert seconds <= BUDGET + SLACK / 2


def test_a_prediction_that_says_nothing_is_not_printed(result_on, monkeypatch):
    vague = Estimate(1_525.0, 17.0, 135_174.0)
    monkeypatch.setattr(Posterior, "speed", lambda *_: vague)
    result, _ = result_on(SlowMachine(start_seconds=45.0, slower=1000.0))
    chosen = result.recommended
    assert (chosen.basis, chosen.cells_per_second) == ("predicted", None)


def test_a_start_that_takes_the_budget_leaves_time_for_one_measurement(result_on):
    machine = SlowMachine(start_seconds=60.0)
    result, _ = result_on(machine)
    assert len(machine.asked) >= 1
    assert result.recommended.cells_per_second is not None


def test_never_what_was_cheapest_to_time(result_on):
    """Single cells, a minibatch at a time, are timed quickly, and slow."""
    for overhead in (1.0, 5.0, 20.0):
        result, _ = result_on(SlowMachine(start_seconds=45.0, slower=100.0, overhead=overhead))
        chosen = result.recommended.configuration
        assert chosen.block_size * chosen.fetch_factor >= 16


def test_what_comes_after_the_choice_is_cut_first(result_on):
    machine = SlowMachine(start_seconds=55.0)
    result, _ = result_on(machine)
    assert result.recommended is not None
    assert not machine.others


def test_a_process_that_dies_leaves_what_was_measured(result_on):
    result, _ = result_on(SlowMachine(dies_at=6))
    assert result.recommended is not None
    assert result.cut_short == "the measuring process died"
    with pytest.raises(MeasuringError):
        result_on(SlowMachine(dies_at=0))


def test_a_loader_that_slows_down_is_looked_at_again(result_on):
    """Fast for two seconds, and then slower than the others."""

    @dataclass
    class Tiring(SlowMachine):
        def run(self, request, *, limit_seconds):
            each = request.configuration
            if not isinstance(request, TimingRequest) or each.block_size != 16:
                return super().run(request, limit_seconds=limit_seconds)
            usual = each.minibatches_per_round * 64 * seconds_per_cell(each)
            rounds, spent = list[Round](), 0.0
            while spent < limit_seconds and (spent < request.seconds or len(rounds) < 5):
                rounds.append(Round(usual if spent < 2 else 20 * usual, bool(rounds), 0.0, None))
                spent += rounds[-1].seconds
            self.now += self.overhead + spent
            events = (Started(0.0, 0.0, 0), *rounds, Findings())
            return Outcome(events=events, peak_memory_bytes=10**8, failure=None)

    result, seconds = result_on(Tiring(), budget=240.0)
    assert result.recommended.configuration.block_size == 4
    assert seconds <= 240 * 1.15
