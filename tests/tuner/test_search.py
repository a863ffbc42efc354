"""The search, on a model of a disk instead of a disk."""

from dataclasses import dataclass, field, replace
from math import ceil

import pytest
from tests.tuner.simulated import (
    BATCH_SIZE,
    Findings,
    Outcome,
    TimingRequest,
    entropy_of,
    failed,
    n_uncounted,
    search_on,
    tahoe_like,
    timed,
)

from cellfeed_tuner import Configuration, Estimate, theory
from cellfeed_tuner._constants import FEWEST_ROUNDS, LEAST_ROUNDS, LEAST_TURNS
from cellfeed_tuner._results import STATUS_WORDS

N_CELLS = 80_000
BLOCKS, FETCHES, WORKERS = (1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256), (0, 1, 2)
GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b in BLOCKS
    for f in FETCHES
    for w in WORKERS
]


def seconds_per_round(configuration: Configuration) -> float:
    """A disk with a price per block and per cell, and workers that help a little."""
    cells = configuration.minibatches_per_round * BATCH_SIZE
    blocks = cells / configuration.block_size
    return (0.001 * blocks + 0.0001 * cells) / (1 + 0.2 * configuration.num_workers)


@dataclass
class ModelProcess:
    """Answers as a measuring process would, at once; its clock goes on as if it had worked."""

    slowness: float = 1.0
    now: float = 0.0
    asked: list[Configuration] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        self.asked.append(request.configuration)
        reading = self.slowness * seconds_per_round(request.configuration)
        computing = request.step_seconds * request.configuration.minibatches_per_round
        seconds = max(reading, computing)  # it reads ahead while training computes
        n_new = n_uncounted(request.configuration, N_CELLS)
        n_rounds = n_new + max(request.least_rounds, ceil(request.seconds / seconds))
        n_rounds = min(n_rounds, request.most_rounds, int(limit_seconds / seconds))
        has_all = n_rounds >= n_new + request.least_rounds
        self.now += n_rounds * seconds if has_all else limit_seconds
        memory = 100 + request.configuration.minibatches_per_round
        waiting = seconds - computing
        return timed(n_rounds * [seconds], n_new=n_new, waiting=waiting, memory=memory)


def search_of(process, *, further=None, **settings):
    entropies = {}
    of_random = theory.expected_entropy_bits([1] * 14, BATCH_SIZE, 1, 1)
    for b in BLOCKS:
        for f in FETCHES:
            bits = theory.expected_entropy_bits([1] * 14, BATCH_SIZE, b, f)
            plate = replace(entropy_of(bits, of_random), upper_bound=4.0)
            entropies[b, f] = {"plate": plate} | (further(b, plate) if further else {})
    geometry = tahoe_like(N_CELLS)
    return search_on(process, entropies, n_cells=N_CELLS, geometry=geometry, **settings)


def run_search(*, process=None, **settings):
    process = process or ModelProcess()
    search = search_of(process, **settings)
    search.run(GRID)
    searched = list(process.asked)
    search.survey()
    results = search.results(GRID)
    choice = search.choose(results)
    assert process.now <= 1.1 * search.measurements.budget.seconds
    return results, choice, searched


def true_speed(configuration: Configuration) -> float:
    return configuration.minibatches_per_round * BATCH_SIZE / seconds_per_round(configuration)


@pytest.mark.parametrize("floor", [0.5, 0.9, 0.95, 0.99])
def test_the_fastest_feasible_configuration_is_found(floor):
    results, choice, _ = run_search(floor=floor)
    feasible = [
        each.configuration for each in results if each.entropy_bits.share_of_random >= floor - 0.001
    ]
    assert choice is not None
    best = max(map(true_speed, feasible))
    assert true_speed(choice.result.configuration) == pytest.approx(best)


def test_what_mixes_too_little_is_not_timed_before_the_choice_is_clear():
    results, _, searched = run_search(floor=0.95)
    shares = {each.configuration: each.entropy_bits.share_of_random for each in results}
    assert all(shares[configuration] >= 0.95 for configuration in searched)


def test_small_blocks_are_skipped_where_larger_ones_are_too_slow_already():
    _, _, searched = run_search(floor=0.95)
    assert not any(each.block_size == 1 and each.fetch_factor == 256 for each in searched)


def test_every_configuration_has_a_status_and_each_that_is_measured_a_throughput():
    results, _, _ = run_search(memory=40_000_000)
    assert [each.configuration for each in results] == GRID
    for each in results:
        assert (each.cells_per_second is not None) == (each.n_rounds >= FEWEST_ROUNDS), each
        assert (each.status == "measured") == (each.n_rounds >= LEAST_ROUNDS), each
    assert "measured" in {each.status for each in results}


def test_buffers_beyond_the_memory_given_are_never_read_into():
    results, _, searched = run_search(memory=500_000)
    over = [each.configuration for each in results if each.status == "over memory"]
    assert Configuration(block_size=1, fetch_factor=256, num_workers=0) in over
    assert not set(over) & set(searched)


def test_with_a_need_the_best_mixed_that_is_fast_enough_is_found():
    need = 5000.0
    _, choice, _ = run_search(need=need)
    assert choice is not None
    assert true_speed(choice.result.configuration) >= need
    at_largest_fetch = [
        Configuration(block_size=b, fetch_factor=256, num_workers=0) for b in BLOCKS
    ]
    faster_blocks = [each.block_size for each in at_largest_fetch if true_speed(each) >= need]
    assert choice.result.configuration.block_size == min(faster_blocks)


def test_with_a_need_what_is_fast_enough_but_mixes_less_is_not_called_slow():
    need = 5000.0
    results, choice, _ = run_search(need=need)
    assert choice is not None
    chosen = choice.result.entropy_bits.share_of_random
    by_status = {status: [e for e in results if e.status == status] for status in STATUS_WORDS}
    assert by_status["mixes less"]
    for each in by_status["mixes less"]:
        assert true_speed(each.configuration) >= 0.8 * need
        assert each.entropy_bits.share_of_random <= chosen
    assert all(true_speed(each.configuration) <= 1.2 * need for each in by_status["too slow"])


def test_the_race_measures_only_the_largest():
    search = search_of(process := ModelProcess())
    search.sampler = "race"
    search.run(GRID)
    raced = set(process.asked)
    assert 1 < len(raced) <= 6
    assert all(each.num_workers == 0 for each in raced)
    results = search.results(GRID)
    sizes = {each: each.block_size * each.fetch_factor for each in GRID if not each.num_workers}
    rest = [each.configuration for each in results if each.status == "not raced"]
    assert max(sizes[each] for each in rest if each in sizes) <= min(sizes[each] for each in raced)
    assert search.choose(results) is not None


def test_a_need_beyond_reach_leaves_the_fastest_measured():
    results, choice, _ = run_search(need=1e9)
    assert choice is None
    measured = [each.configuration for each in results if each.cells_per_second is not None]
    mixing = [e.configuration for e in results if e.entropy_bits.share_of_random >= 0.95]
    assert max(map(true_speed, measured)) >= max(map(true_speed, mixing)) * 0.999


@dataclass
class FailingProcess(ModelProcess):
    """A process in which workers cannot be started."""

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        if request.configuration.num_workers == 0:
            return ModelProcess.run(self, request, limit_seconds=limit_seconds)
        self.asked.append(request.configuration)
        self.now += 0.1
        return failed("no workers here")


def test_what_fails_is_reported_and_the_rest_is_searched():
    results, choice, searched = run_search(process=FailingProcess())
    failed = [each for each in results if each.status == "failed"]
    assert failed
    assert {each.note for each in failed} == {"no workers here"}
    assert all(searched.count(each.configuration) <= 1 for each in failed)
    best = max(
        true_speed(each.configuration)
        for each in results
        if each.entropy_bits.share_of_random >= 0.95 and each.configuration.num_workers == 0
    )
    assert choice is not None
    assert true_speed(choice.result.configuration) >= 0.97 * best


@pytest.mark.parametrize("slowness", [0.01, 0.1, 10.0, 30.0])
def test_a_choice_is_made_within_the_budget_however_fast_the_disk(slowness):
    _, choice, _ = run_search(process=ModelProcess(slowness))
    assert choice is not None


def test_where_nothing_mixes_well_enough_what_comes_nearest_is_measured():
    search = search_of(ModelProcess(), floor=1.0)
    grid = [each for each in GRID if each.block_size > 16]
    search.run(grid)
    assert len(search.measurements) == 0
    search.survey()
    results = search.results(grid)
    assert search.choose(results) is None
    assert any(each.status == "measured" for each in results)
    assert not any(search.requirements.mixes(each) for each in search.measurements)


def test_what_may_be_the_best_is_measured_in_turns_and_the_rest_is_not():
    """What leads is looked at most often, and in the last turn; what is far slower only once."""
    process = ModelProcess()
    search = search_of(process, budget=300.0)
    search.run(GRID)
    assert len(search.turns) >= LEAST_TURNS
    choice = search.choose(search.results(GRID))
    assert choice is not None
    chosen, best = choice.result.configuration, max(map(true_speed, costs()))
    assert true_speed(chosen) == pytest.approx(best)
    assert chosen in process.asked[-2:]
    counts = {each: process.asked.count(each) for each in process.asked}
    assert max(counts, key=counts.__getitem__) == chosen
    assert min(counts.values()) < counts[chosen]
    slow = [each for each in process.asked if true_speed(each) < 0.5 * best]
    assert len(slow) == len(set(slow))


@dataclass
class DisturbedProcess(ModelProcess):
    """Something else slows down the first replicate of one configuration."""

    disturbed: Configuration | None = None

    def run(self, request, *, limit_seconds):
        first = request.configuration == self.disturbed
        self.slowness = 1.0
        if first and self.disturbed not in self.asked:
            self.slowness = 1.8
        return super().run(request, limit_seconds=limit_seconds)


@pytest.mark.parametrize("budget", [60.0, 120.0])
def test_one_disturbed_replicate_does_not_put_the_best_out_of_the_race(budget):
    best = min(costs(), key=costs().__getitem__)
    process = DisturbedProcess(disturbed=best)
    search = search_of(process, budget=budget)
    search.run(GRID)
    choice = search.choose(search.results(GRID))
    assert best in process.asked
    assert choice is not None
    assert true_speed(choice.result.configuration) >= 0.95 * true_speed(best)


def costs():
    """Seconds per cell of all that mixes well enough."""
    return {
        each: 1 / true_speed(each)
        for each in GRID
        if theory.expected_entropy_bits([1] * 14, BATCH_SIZE, each.block_size, each.fetch_factor)
        >= 0.95 * theory.expected_entropy_bits([1] * 14, BATCH_SIZE, 1, 1)
    }


def stepped(step_seconds, budget=60.0, slowness=1.0):
    """What is chosen for a training step, and how it does with it."""
    search = search_of(process := ModelProcess(slowness), step_seconds=step_seconds, budget=budget)
    search.run(GRID)
    choice = search.choose(search.results(GRID))
    assert choice is not None
    found = search.with_step(choice)
    assert process.now <= 1.1 * budget
    return choice, found


class TestTrainingStep:
    def test_what_keeps_up_does_not_let_training_wait(self):
        choice, found = stepped(BATCH_SIZE / 60_000, slowness=0.1)
        assert true_speed(choice.result.configuration) / 0.1 >= 60_000
        assert len(found.round_seconds) >= LEAST_ROUNDS
        assert found.waiting_share.value == 0

    def test_what_does_not_keep_up_lets_it_wait_as_long_as_reading_takes(self):
        choice, found = stepped(BATCH_SIZE / 40_000)
        speed = true_speed(choice.result.configuration)
        assert speed == pytest.approx(max(map(true_speed, costs())), rel=0.02)
        assert "None keeps up with training." in choice.reason
        assert found.waiting_share.value == pytest.approx(1 - speed / 40_000)

    def test_a_long_step_is_measured_for_as_long_as_there_is_time(self):
        _, found = stepped(7.0, budget=60.0)
        assert 1 <= len(found.round_seconds) < LEAST_ROUNDS

    def test_there_may_be_no_time_for_it_at_all(self):
        _, found = stepped(20.0)
        assert found is None

    @pytest.mark.parametrize("slowness", [1e3, 1e6])
    def test_where_no_fetch_ends_in_time_the_likeliest_is_chosen(self, slowness):
        """All that was begun was stopped: a step is no requirement, so there is an answer."""
        choice, found = stepped(BATCH_SIZE / 60_000, budget=15.0, slowness=slowness)
        assert choice.basis == "predicted"
        assert found is None


def test_what_an_earlier_run_found_is_looked_at_first_and_not_believed():
    slow = [each for each in costs() if each.block_size <= 4][:3]
    search = search_of(process := ModelProcess(0.05), known=slow)
    search.run(GRID)
    assert process.asked[:2] == slow[:2]
    assert slow[2] not in process.asked
    choice = search.choose(search.results(GRID))
    assert choice is not None
    assert true_speed(choice.result.configuration) >= 0.97 * max(map(true_speed, costs()))


def test_what_was_measured_can_be_kept():
    search = search_of(ModelProcess())
    search.run(GRID)
    kept = search.measurements.with_throughput()
    timed = [each for each in search.results(GRID) if each.cells_per_second is not None]
    assert kept
    assert set(kept) == {each.configuration for each in timed}
    assert all(len(kept[each.configuration].round_seconds) == each.n_rounds for each in timed)


@dataclass
class FaultyProcess(ModelProcess):
    """A process in which one configuration delivers something else than its plan."""

    faulty: Configuration = GRID[1]

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        outcome = ModelProcess.run(self, request, limit_seconds=limit_seconds)
        fault = "minibatch 0 is another" if request.configuration == self.faulty else ""
        return replace(outcome, events=(*outcome.events, Findings(fault=fault)))


def test_a_fault_of_delivery_is_remembered():
    search = search_of(process := FaultyProcess())
    search.run([process.faulty, GRID[0]])
    assert search.measurements.faults == {process.faulty: "minibatch 0 is another"}


def test_a_configuration_is_as_mixed_as_its_least_mixed_label():
    """A second label that blocks of 16 and more hardly mix keeps these from being chosen."""

    def cell_line(block_size, plate):
        bits = (1.0 if block_size < 16 else 0.9) * plate.random
        return {"cell_line": replace(plate, expected=Estimate(bits, bits, bits))}

    results, choice, searched = run_search(floor=0.95, further=cell_line)
    assert choice is not None
    assert choice.result.configuration.block_size < 16
    assert choice.result.further_labels["cell_line"].entropy_bits.share_of_random == 1.0
    assert all(each.block_size < 16 for each in searched)
    for each in results:
        mixes = each.entropy_bits.share_of_random >= 0.95 and each.configuration.block_size < 16
        assert (each.least_mixed.share_of_random >= 0.95) == mixes
        assert mixes or each.status in {"below entropy floor", "measured", "too few cells"}
