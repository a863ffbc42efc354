"""How many ranks are fed, held against machines of which the truth is known."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import commands
from tests.tuner import ranked_loaders
from tests.tuner.measured_here import MeasuringHere
from tests.tuner.reports import printed
from tests.tuner.simulated import Outcome, Round, Started, TimingRequest

from cellfeed import ParameterError
from cellfeed_tuner import Configuration, Estimate, Scaling, autotune
from cellfeed_tuner import _scaling as scaling
from cellfeed_tuner._machine import OtherPrograms, ProcessorTime
from cellfeed_tuner._measuring._measurement import measured
from cellfeed_tuner._result import from_plain, to_plain

BATCH_SIZE = 64
CHOSEN = Configuration(block_size=16, fetch_factor=4)


@dataclass
class Machine:
    """Ranks read with threads, which wait for storage, and share cores and a bandwidth.

    Parameters
    ----------
    waits, computes
        Seconds that a thread waits for a cell, and that a cell takes of a processor.
    bandwidth
        Cells per second that storage gives to all.
    """

    cores: int = 8
    waits: float = 0.0
    computes: float = 1e-4
    bandwidth: float = np.inf
    noise: float = 0.0
    fails: str = ""
    rng: Any = field(default_factory=lambda: np.random.default_rng(0))
    now: float = 0.0
    asked: list[Any] = field(default_factory=list)

    def speed(self, n: int, threads: int | None = None) -> float:
        """Cells per second of all ranks together."""
        threads = threads or max(1, self.cores // n)
        of_rank = threads / (self.waits + self.computes)
        return min(n * of_rank, self.cores / self.computes, self.bandwidth)

    def limit(self, n: int) -> str:
        threads = n * max(1, self.cores // n) / (self.waits + self.computes)
        shared = {"processors": self.cores / self.computes, "storage": self.bandwidth}
        least = min(shared, key=shared.__getitem__)
        return "threads" if threads < 0.9 * shared[least] else least

    def utilization(self, n: int, step_seconds: float) -> float:
        return min(1.0, self.speed(n) / n / (BATCH_SIZE / step_seconds))

    def timed(self, configuration, *, ranks, step_seconds=0.0, least_rounds=4, limit_seconds=1e9):
        self.asked.append((configuration, ranks, step_seconds))
        n, n_minibatches = ranks.n_local, configuration.minibatches_per_round
        speed = self.speed(n, configuration.others.get("num_threads"))
        cells = n_minibatches * BATCH_SIZE * n
        loading, training = cells / speed, n_minibatches * step_seconds
        rounds = []
        for _ in range(least_rounds + 2):
            seconds = loading * float(np.exp(self.noise * self.rng.standard_normal()))
            waiting = max(0.0, seconds - training) if step_seconds else seconds
            computed = ProcessorTime(cells * self.computes, 0.0)
            whole = training + waiting
            rounds.append(Round(whole, True, waiting, None, processor=computed))
            self.now += whole
        outcome = Outcome(
            events=() if self.fails else (Started(0.0, 0.0, 0), *rounds),
            peak_memory_bytes=1,
            failure=self.fails or None,
            others=OtherPrograms(seconds=1.0, cpu_seconds=0.0),
        )
        request = TimingRequest(
            configuration=configuration, batch_size=BATCH_SIZE, labels=(), cache="cold", seed=0,
            least_rounds=least_rounds, ranks=ranks,
        )  # fmt: skip
        return measured(request, outcome)


def asked_of(machine, *, step_seconds, counts=range(1, 9), **settings):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scaling, "usable_cores", lambda: float(machine.cores))
        patched.setattr(scaling, "usable_cpu_count", lambda: machine.cores)
        found = scaling.ScalingSearch(
            timed=machine.timed,
            configuration=settings.get("configuration", CHOSEN),
            counts=tuple(counts),
            step_seconds=step_seconds,
            batch_size=BATCH_SIZE,
            left=lambda: settings.get("seconds", 1e6) - machine.now,
            has_threads=True,
            cache="cold",
        )
        return found.run()


MACHINES = {
    "processors": Machine(),
    "few processors": Machine(cores=2),
    "bandwidth": Machine(bandwidth=3_000.0),
    "bandwidth and processors": Machine(bandwidth=60_000.0),
    "latency": Machine(cores=2, waits=0.01),
    "latency, one thread": Machine(cores=1, waits=0.01),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 1.0, 3.0])
def test_utilization_is_within_5_points_of_the_truth(name, share):
    machine = MACHINES[name]
    # Training that takes what share of the machine is there for each of 8.
    step_seconds = 8 * BATCH_SIZE * share / machine.speed(8)
    found = asked_of(machine, step_seconds=step_seconds)
    assert [each.n_ranks for each in found.ranks] == [*range(1, 9)]
    for each in found.ranks:
        true = machine.utilization(each.n_ranks, step_seconds)
        assert each.utilization.value == pytest.approx(true, abs=0.05)
        assert each.utilization.low <= each.utilization.value <= each.utilization.high
        if true < 0.95:
            assert each.limit == machine.limit(each.n_ranks)
        if true == 1.0:
            assert each.limit == "training"
        assert each.basis == ("timed" if each.n_ranks <= 2 else "predicted")


@given(
    cores=st.integers(1, 32),
    waits=st.floats(0, 0.01),
    computes=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e3, 1e6),
    step_seconds=st.floats(1e-3, 0.3),
)
def test_intervals_of_any_machine_hold_the_truth_or_the_bandwidth_was_not_seen(
    cores, waits, computes, bandwidth, step_seconds
):
    machine = Machine(cores, waits, computes, bandwidth)
    for each in asked_of(machine, step_seconds=step_seconds).ranks:
        true = machine.utilization(each.n_ranks, step_seconds)
        assert each.utilization.low - 0.02 <= true <= each.utilization.high + 0.02
        if not each.is_beyond:
            continue
        assert each.basis == "predicted"
        assert "beyond what was measured" in each.remark


def test_what_storage_gives_beyond_what_was_seen_is_between_that_and_all():
    machine = Machine(cores=8, bandwidth=np.inf, waits=1e-3)
    more = asked_of(machine, step_seconds=BATCH_SIZE / 30_000, counts=[1, 2, 8])
    *_, eight = more.ranks
    assert eight.is_beyond
    assert eight.utilization.low < eight.utilization.value


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_rounds_that_vary_wait_more(noise):
    machine = Machine(bandwidth=8_000.0, noise=noise)
    step_seconds = 4 * BATCH_SIZE / machine.bandwidth
    found = asked_of(machine, step_seconds=step_seconds, counts=[4])
    loading = np.exp(noise * np.random.default_rng(1).standard_normal(100_000))
    true = 1 / np.maximum(loading, 1.0).mean()
    assert found.ranks[0].utilization.value == pytest.approx(true, abs=0.05)


def test_the_number_that_is_fed():
    machine = Machine(bandwidth=10_000.0)
    found = asked_of(machine, step_seconds=BATCH_SIZE / 2_400)
    assert (found.n_fed, found.n_surely_fed) == (4, found.n_surely_fed)
    assert found.n_surely_fed in (3, 4)
    assert "feed 4 ranks" in found.sentence
    assert "more are limited by storage" in found.sentence
    assert asked_of(machine, step_seconds=BATCH_SIZE / 100).n_fed == 8
    assert "the most that were asked for" in asked_of(machine, step_seconds=1.0).sentence
    none = asked_of(machine, step_seconds=BATCH_SIZE / 20_000)
    assert none.n_fed == 0
    assert "1 rank would train 50% of the time, below 90%" in none.sentence


def test_a_rank_alone_is_also_measured_with_the_threads_of_one_of_two():
    machine = Machine()
    asked_of(machine, step_seconds=0.01)
    threads = {(each.others.get("num_threads"), ranks.n_local) for each, ranks, _ in machine.asked}
    assert threads == {(None, 1), (4, 1), (None, 2)}


def test_a_step_that_is_too_long_to_be_timed_is_predicted():
    machine = Machine()
    found = asked_of(machine, step_seconds=30.0, seconds=600.0)
    assert {each.basis for each in found.ranks} == {"predicted"}
    assert not any(each.is_beyond for each in found.ranks)
    assert not any(step for *_, step in machine.asked)


def test_processors_that_others_take_are_not_taken_for_memory():
    alone = {2: Estimate(10_000.0, 9_900.0, 10_100.0), 1: Estimate(9_000.0, 8_900.0, 9_100.0)}
    model = scaling.RankModel(
        alone=alone, together=alone[2], processor_seconds=(1e-4, 1e-4), cores=2.0, cache="warm",
        num_threads=2,
    )  # fmt: skip
    assert model.shared[1] == "memory"
    assert replace(model, waits_for_processors=2.0).shared == (10_000.0, "processors")
    idle = replace(model, waits_for_processors=2.0, processor_seconds=(1e-6, 1e-6))
    assert idle.shared[1] == "memory"


def test_what_was_measured_may_be_less_than_the_model_says():
    used = [Estimate(0.95, 0.9, 1.0), Estimate(0.85, 0.8, 0.9)]
    ranks = tuple(
        scaling.FedRanks(
            n_ranks=n, utilization=used[n - 1], basis="timed", limit="training",
            needed_cells_per_second=1.0,
        )
        for n in (1, 2)
    )  # fmt: skip
    said = Scaling(step_seconds=0.01, ranks=ranks).sentence
    assert said.endswith("feed 1 rank at a utilization of 90%; 2 ranks reach 85%.")


def test_what_fails_is_said():
    found = asked_of(Machine(fails="no such file"), step_seconds=0.01)
    assert not found.ranks
    assert found.sentence == (
        "How many ranks with a training step of 10 ms are fed is not known: timing one rank "
        "failed: no such file."
    )
    assert found.n_fed == 0


def test_is_the_same_as_json():
    found = asked_of(Machine(bandwidth=9_000.0), step_seconds=0.02)
    assert from_plain(Scaling, to_plain(found)) == found


def test_is_in_the_report(result_of):
    asked = asked_of(Machine(bandwidth=9_000.0), step_seconds=0.02, counts=[1, 4])
    said = printed(replace(result_of("recommended"), scaling=asked))
    assert asked.sentence.split(";")[0] in said
    assert "4 ranks:" in said


@pytest.mark.process
def test_other_loaders_are_asked_too():
    found = autotune(
        ranked_loaders.Numbers(), ranks=[1, 2, 4], step_seconds=0.01, budget=60.0,
        entropy_floor=0.0,
    )  # fmt: skip
    assert found.scaling is not None
    assert [each.n_ranks for each in found.scaling.ranks] == [1, 2, 4]
    assert isinstance(found.scaling.two, Estimate)
    assert found.ranks.n_local == 1


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([1, 2], "how many of several ranks are fed depends on the time of a training step"),
        ([0, 2], "`ranks >= 1` must hold, but got ranks=0"),
        ([], "`ranks` must have a number"),
    ],
)
def test_what_cannot_be_asked(ranks, said):
    with pytest.raises(ParameterError, match=said):
        autotune(ranked_loaders.Numbers(), ranks=ranks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "1:8"], "give `--step-ms`, or one number of ranks"),
        (["--ranks", "1:8", "--need", "100"], "--step-ms"),
        (["--ranks", "0:8", "--step-ms", "4"], "0 is below 1, the minimum"),
        (["--ranks", "8:1", "--step-ms", "4"], "is an empty range"),
        (["--ranks", "many", "--step-ms", "4"], "is not a list of integers"),
    ],
)
def test_what_the_command_refuses(small_collection, monkeypatch, options, said):
    process = "cellfeed_tuner._measuring._process.MeasuringProcess"
    monkeypatch.setattr(process, MeasuringHere)
    ran = commands.autotune(str(small_collection), "--label", "plate", *options)
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert len([line for line in ran.stderr.splitlines() if "rror" in line]) == 1
