"""What a search promises, on machines of which the truth is known."""

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from tests.tuner.simulated import BATCH_SIZE, Found, Machine, Space, entropy_of, searched

from cellfeed_tuner import Configuration, Estimate, theory

N_CELLS = 80_000
BLOCKS, FETCHES, WORKERS = (1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256), (0, 1, 2)
GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b, f, w in product(BLOCKS, FETCHES, WORKERS)
]


def cost(each: Configuration) -> float:
    """Seconds per cell of a disk with a price per block and cell, where workers help a little."""
    return (0.001 / each.block_size + 0.0001) / (1 + 0.2 * each.num_workers)


@cache
def bits(block_size: int, fetch_factor: int) -> float:
    return theory.expected_entropy_bits([1] * 14, BATCH_SIZE, block_size, fetch_factor)


RANDOM_BITS = bits(1, 1)
ENTROPIES = {
    sizes: {"plate": replace(entropy_of(bits(*sizes), RANDOM_BITS), upper_bound=4.0)}
    for sizes in product(BLOCKS, FETCHES)
}


def share(each: Configuration) -> float:
    return bits(each.block_size, each.fetch_factor) / RANDOM_BITS


def best(floor: float = 0.95) -> Configuration:
    return min((each for each in GRID if share(each) >= floor - 0.001), key=cost)


def search(machine: Machine | None = None, *, slower: float = 1.0, **settings: Any) -> Found:
    """Search the grid, and check what holds for any search."""
    machine = machine or Machine(lambda each: slower * cost(each), N_CELLS)
    options: dict[str, Any] = {"entropies": ENTROPIES, "floor": 0.95, "budget": 60.0} | settings
    found = searched(machine, GRID, **options)
    assert found.seconds <= 1.1 * options["budget"]
    assert [each.configuration for each in found.results] == GRID
    for each in found.results:
        assert (each.cells_per_second is not None) == (each.n_rounds > 0), each
        assert (each.status == "timed") == (each.n_rounds > 0), each
    # What mixes too little is not measured before the choice is clear.
    assert all(share(each) >= options["floor"] - 0.001 for each in found.asked)
    return found


@pytest.mark.parametrize("floor", [0.5, 0.9, 0.95, 0.99])
def test_the_fastest_feasible_configuration_is_found(floor):
    found = search(floor=floor)
    assert cost(found.chosen) == pytest.approx(cost(best(floor)))
    assert found.by_status("timed")


@pytest.mark.parametrize(("busy", "widest"), [(0.0, 256), (0.9, 16)])
def test_the_first_is_the_widest_of_which_a_fetch_is_expected_in_time(busy, widest):
    assert search(busy=busy).asked[0].fetch_factor == widest


def test_after_a_fetch_that_did_not_end_a_narrower_one_is_timed():
    """A fetch that is as long does not end either, and there is a budget for a few."""
    widths = [each.fetch_factor for each in search(slower=100.0).asked[:4]]
    assert all(next_ <= width / 2 for width, next_ in pairwise(widths)), widths


def test_every_feasible_pair_is_timed_and_the_best_with_each_number_of_workers():
    found = search(slower=0.1)
    alone = [each for each in GRID if not each.num_workers and share(each) >= 0.949]
    feasible = [each for each in alone if 64 * each.fetch_factor <= N_CELLS]
    assert {each for each in found.asked if not each.num_workers} == {*feasible}
    first = found.asked[0]
    assert (first.fetch_factor, first.num_workers) == (256, 0)  # widest first
    chosen = found.chosen.plan_settings
    assert {each.num_workers for each in found.asked if each.plan_settings == chosen} == {*WORKERS}


@pytest.mark.parametrize("slower", [0.01, 0.1, 10.0, 30.0])
def test_a_choice_is_made_within_the_budget_however_fast_the_disk(slower):
    assert share(search(slower=slower).chosen) >= 0.949


def test_buffers_beyond_the_memory_are_never_read_into():
    found = search(memory=500_000)
    over = [each.configuration for each in found.by_status("over memory")]
    assert Configuration(block_size=1, fetch_factor=256, num_workers=0) in over
    assert not set(over) & set(found.asked)


def test_what_a_process_takes_without_buffers_counts_for_what_was_not_timed():
    """Each configuration takes 400 MB and its buffers, so none fits in 100 MB."""
    machine = Machine(cost, N_CELLS, memory=lambda each: 4 * 10**8 + each.minibatches_in_memory)
    found = search(machine, memory=10**8, budget=5.0)
    assert found.choice is None
    over = {each.configuration for each in found.by_status("over memory")}
    assert over
    assert not over & {*found.asked}


def test_what_compiles_while_it_is_timed_is_timed_again():
    """The first of all, as where the cache of compiled code is new."""
    quiet = search(slower=0.01, budget=20.0)
    machine = Machine(
        lambda each: 0.01 * cost(each), N_CELLS, compiles=lambda number: 5.0 * (number == 0)
    )
    found = search(machine, budget=20.0)
    assert found.search.measurements.n_discarded == 1
    assert found.asked[:2] == [quiet.asked[0]] * 2
    first = found.search.measurements.replicates(quiet.asked[0])[0]
    assert first.seconds_per_cell == pytest.approx(0.01 * cost(quiet.asked[0]))


def test_with_a_need_the_best_mixed_that_is_fast_enough_is_found():
    need = 5000.0
    found = search(need=need)
    smallest = min(
        b for b in BLOCKS if cost(Configuration(block_size=b, fetch_factor=1)) <= 1 / need
    )
    assert found.chosen.block_size == smallest
    assert cost(found.chosen) <= 1 / need
    # What is fast enough but mixes less is not called slow.
    assert found.by_status("mixes less")
    for each in found.by_status("mixes less"):
        assert share(each.configuration) <= share(found.chosen)
    assert all(cost(e.configuration) >= 1 / (1.2 * need) for e in found.by_status("too slow"))


def test_a_need_beyond_reach_leaves_the_fastest_measured():
    found = search(need=1e9)
    assert found.choice is None
    assert min(map(cost, found.asked)) <= cost(best()) / 0.999


def test_what_fails_is_reported_and_tried_once_and_the_rest_is_searched():
    found = search(Machine(cost, N_CELLS, fails=lambda each: each.num_workers > 0))
    failed = found.by_status("failed")
    assert failed
    assert {each.note for each in failed} == {"no workers here"}
    assert all(found.asked.count(each.configuration) <= 1 for each in failed)
    feasible = [each for each in GRID if share(each) >= 0.95 and not each.num_workers]
    assert cost(found.chosen) <= min(map(cost, feasible)) / 0.97


def test_where_nothing_mixes_well_enough_what_comes_nearest_is_measured():
    machine = Machine(cost, N_CELLS)
    found = searched(machine, [e for e in GRID if e.block_size > 16], ENTROPIES, floor=1.0)
    assert (found.asked, found.choice) == ([], None)
    assert found.by_status("timed")
    assert all(share(each) < 0.999 for each in machine.asked)


def test_a_configuration_is_as_mixed_as_its_least_mixed_label():
    """A second label that blocks of 16 and more hardly mix keeps these from being chosen."""

    def cell_line(block_size, plate):
        value = (1.0 if block_size < 16 else 0.9) * plate.random
        return replace(plate, expected=Estimate(value, value, value))

    entropies = {
        sizes: each | {"cell_line": cell_line(sizes[0], each["plate"])}
        for sizes, each in ENTROPIES.items()
    }
    found = search(entropies=entropies)
    assert all(each.block_size < 16 for each in [found.chosen, *found.asked])
    assert found.choice is not None
    assert found.choice.result.labels["cell_line"].entropy_bits.share_of_random == 1.0
    for each in found.results:
        mixes = share(each.configuration) >= 0.95 and each.configuration.block_size < 16
        assert (each.share_of_random >= 0.95) == mixes
        assert mixes or each.status in {"below entropy floor", "measured", "too few cells"}


def test_what_may_be_the_best_is_timed_in_turns_and_the_rest_once():
    """What leads is looked at most often, and in the last turn."""
    found = search(budget=300.0)
    assert cost(found.chosen) == pytest.approx(cost(best()))
    assert found.chosen in found.asked[-2:]
    counts = {each: found.asked.count(each) for each in found.asked}
    assert max(counts, key=counts.__getitem__) == found.chosen
    assert min(counts.values()) < counts[found.chosen] >= 4
    assert all(n <= 2 for each, n in counts.items() if cost(each) > 2 * cost(best()))
    for each, n in counts.items():
        assert len(found.search.measurements[each].replicate_seconds) == n


class TestLastTurn:
    """What is clear is measured once more, and what that shows counts."""

    GRID = tuple(Configuration(block_size=b, fetch_factor=f) for b in (4, 16, 64) for f in (16, 64))

    @staticmethod
    def cost(each):
        return 1e-4 * (1 + 4 / each.block_size + 4 / each.fetch_factor)

    def searched(self, factor=lambda _each, _number: 1.0):
        machine = Machine(self.cost, factor=factor, overhead=1.0)
        return searched(machine, self.GRID, ENTROPIES, floor=0.5, budget=120.0)

    @pytest.mark.slow
    @pytest.mark.parametrize("slower", [1.0, 2.0, 3.0])
    def test_what_slows_down_in_it_is_not_chosen(self, slower):
        """All is as before until then; where it is as fast as before, the search ends with it."""
        quiet = self.searched()
        chosen, n_looks = quiet.chosen, len(quiet.asked)
        assert chosen == min(self.GRID, key=self.cost)
        assert chosen in quiet.asked[-2:]
        found = self.searched(
            lambda each, number: slower if each == chosen and number >= n_looks - 2 else 1.0
        )
        if slower == 1.0:
            assert found.asked == quiet.asked
        else:
            rest = [self.cost(each) for each in self.GRID if each != chosen]
            assert len(found.asked) > n_looks
            assert found.chosen != chosen
            assert self.cost(found.chosen) <= 1.05 * min(rest)


class TestTrainingStep:
    def step(self, step_seconds, **settings):
        """What is chosen for a training step, and how it does with it."""
        found = search(step_seconds=step_seconds, **settings)
        assert found.choice is not None
        return found.choice, found.search.with_step(found.choice)

    def test_what_keeps_up_does_not_let_training_wait(self):
        choice, found = self.step(BATCH_SIZE / 60_000, slower=0.1)
        assert cost(choice.configuration) * 0.1 <= 1 / 60_000
        assert len(found.round_seconds) >= 8
        assert found.waiting_share.value == 0

    def test_what_does_not_keep_up_lets_it_wait_as_long_as_reading_takes(self):
        choice, found = self.step(BATCH_SIZE / 40_000, budget=120.0)
        assert cost(choice.configuration) == pytest.approx(cost(best()), rel=0.02)
        assert "None keeps up with training." in choice.reason
        expected = 1 - 1 / cost(choice.configuration) / 40_000
        assert found.waiting_share.value == pytest.approx(expected)

    def test_a_long_step_is_measured_if_there_is_time_for_it(self):
        _, found = self.step(7.0, budget=120.0)
        assert 1 <= len(found.round_seconds) < 8
        assert self.step(40.0)[1] is None

    @pytest.mark.parametrize("slower", [1e3, 1e6])
    def test_where_no_fetch_ends_in_time_the_likeliest_is_chosen(self, slower):
        """A step is no requirement, so there is an answer."""
        choice, found = self.step(BATCH_SIZE / 60_000, budget=15.0, slower=slower)
        assert (choice.basis, found) == ("predicted", None)


class TestStudy:
    """The search as a study of Optuna; a slow machine, on which few are timed."""

    GRID = tuple(
        Configuration(block_size=b, fetch_factor=f, num_workers=w)
        for b, f, w in product((4, 16, 64, 256), (4, 16, 64), (0, 2))
    )

    @staticmethod
    def cost(each):
        """Least at block 64, fetch 64 and no workers."""
        apart = abs(np.log2(each.block_size / 64)) + abs(np.log2(each.fetch_factor / 64))
        return 1e-5 * (1 + 0.2 * apart + 0.3 * each.num_workers)

    def searched(self, study=None, *, memory=10**6, seed=0, budget=60.0, **machine):
        mixed = {each.plan_settings: {"plate": entropy_of(1.0, 1.0)} for each in self.GRID}
        return searched(
            Machine(
                self.cost, overhead=2.0, memory=lambda each: 10 * each.fetch_factor, **machine
            ),
            self.GRID, mixed, floor=0.5, memory=memory, row_bytes=1e-6, seed=seed, budget=budget,
            study=study,
        )  # fmt: skip

    @pytest.mark.parametrize("sampler", ["RandomSampler", "TPESampler"])
    def test_a_users_sampler_says_what_is_timed_first(self, sampler):
        study = optuna.create_study(sampler=getattr(optuna.samplers, sampler)(seed=0))
        found = self.searched(study)
        proposed = [Configuration(**each.params) for each in study.trials]
        alone = [each for each in proposed if not each.num_workers]
        # After the first, which is the widest.
        assert found.asked[1:4] == [e for e in dict.fromkeys(alone) if e != found.asked[0]][:3]
        assert {*found.asked} <= {*self.GRID}
        assert found.chosen == min(self.GRID, key=self.cost)

    def test_what_a_users_pruner_drops_is_timed_no_more(self):
        dropped: dict[tuple[Any, ...], int] = {}

        class Always(optuna.pruners.BasePruner):
            def prune(self, study, trial):
                assert trial.value > study.best_value  # it is not the fastest
                dropped[tuple(trial.params.values())] = len(trial.intermediate_values)
                return True

        study = optuna.create_study(pruner=Always())
        found = self.searched(study, noise=0.15, budget=300.0)
        steps: dict[tuple[Any, ...], int] = {}
        for each in study.trials:  # what was proposed again has none
            own = tuple(each.params.values())
            steps[own] = max(steps.get(own, 0), len(each.intermediate_values))
        assert dropped
        assert {each: steps[each] for each in dropped} == dropped
        assert found.choice is not None

    @pytest.mark.slow
    def test_a_study_is_written_to_a_storage_while_it_runs(self, tmp_path):
        url = f"sqlite:///{tmp_path}/autotune.db"
        seen = list[int]()

        def count(_each, _number):
            if (tmp_path / "autotune.db").exists():
                (study,) = optuna.get_all_study_summaries(url)
                seen.append(study.n_trials)
            return 1.0

        found = self.searched(url, factor=count, budget=20.0)
        assert sorted(seen) == seen
        assert seen[-1] > seen[0]
        (name,) = optuna.get_all_study_names(url)
        study = optuna.load_study(study_name=name, storage=url)
        assert [Configuration(**e.params) for e in study.trials] == [*dict.fromkeys(found.asked)]

    def test_the_study_says_how_each_configuration_ended(self):
        broken, memory = self.GRID[0], 300
        found = self.searched(memory=memory, fails=lambda each: each == broken)
        trials = {Configuration(**e.params): e for e in found.search.ended_trials()}
        assert list(trials) == list(dict.fromkeys(found.asked))
        states = {each: trial.state for each, trial in trials.items()}
        assert states[broken] == TrialState.FAIL
        large = [each for each in states if 10 * each.fetch_factor > memory]
        assert large
        assert {states[each] for each in large} == {TrialState.PRUNED}
        fastest = min({*states} - {*large, broken}, key=self.cost)
        assert states[fastest] == TrialState.COMPLETE
        assert trials[fastest].value == pytest.approx(self.cost(fastest))
        assert trials[fastest].user_attrs["peak_memory_bytes"] == 10 * fastest.fetch_factor
        if hasattr(trials[large[0]], "constraints"):  # since Optuna 5
            excess = trials[large[0]].constraints["memory"]
            assert excess > 0 >= trials[fastest].constraints["memory"]


class TestRanges:
    """A space too large to list: seeks, chunks, fetches that outgrow a cache, workers that hinder.

    All cells have the first label in common; how the second is mixed is found when it is asked for.
    """

    RANGES = Space.of(range(1, 4097), range(1, 513), range(9))
    N_CELLS, ROW_BYTES, MEMORY, BITS = 10_000_000, 10_000.0, 4 * 10**9, 3.6

    @staticmethod
    def speeds(block, fetch, workers):
        cells = BATCH_SIZE * fetch
        chunks = np.maximum(1, cells / block) * (1 + (block - 1) / 100)
        outgrown = 1 + 0.05 * (cells / 6000) ** 1.5
        together = np.where(workers > 0, (1 + 0.6 * workers) / (1 + 0.06 * workers**2), 1.0)
        transfer = np.where(workers > 0, 4e-6 * cells, 0.0)
        return cells / ((2e-4 * chunks + 1e-5 * cells * outgrown + 0.002) / together + transfer)

    @staticmethod
    def shares(block, fetch):
        """To first order in the blocks of a fetch; see `theory.lower_bound_bits`."""
        return np.maximum(0.0, 1 - 2.57 * block / (BATCH_SIZE * fetch))

    def speed(self, each: Configuration) -> float:
        return float(self.speeds(*map(np.float64, each.values())))

    def share(self, each: Configuration) -> float:
        return float(self.shares(*map(np.float64, each.plan_settings)))

    def bytes_of(self, each: Configuration) -> int:
        return int(each.minibatches_in_memory * BATCH_SIZE * self.ROW_BYTES)

    def fastest(self, floor=0.95, least_speed=0.0):
        """The largest throughput of all that meets the constraints, and the best mixed of those."""
        sizes = [np.unique(np.geomspace(1, most, 200).astype(int)) for most in (4096, 512)]
        block, fetch, workers = np.ix_(*sizes, np.arange(9))
        memory = fetch * np.maximum(1, workers) * np.where(workers > 0, 3, 2)
        fits = memory * BATCH_SIZE * self.ROW_BYTES <= self.MEMORY
        speeds = self.speeds(block, fetch, workers) * fits
        shares = np.broadcast_to(self.shares(block, fetch), speeds.shape)
        return speeds[shares >= floor - 0.001].max(), shares[speeds >= least_speed].max()

    def searched(self, space, seed=0, *, floor=0.95, **settings):
        outer = self

        class Replays(dict[tuple[int, int], Any]):
            def __missing__(self, sizes):
                value = outer.BITS * float(outer.shares(*map(np.float64, sizes)))
                self[sizes] = {
                    "species": entropy_of(outer.BITS, outer.BITS),
                    "plate": entropy_of(value, outer.BITS),
                }
                return self[sizes]

        machine = Machine(
            lambda each: 1 / self.speed(each), self.N_CELLS, memory=self.bytes_of, overhead=0.3,
            noise=0.01, round_noise=0.02, seed=seed,
        )  # fmt: skip
        options = {"budget": 90.0, "memory": self.MEMORY} | settings
        found = searched(
            machine, space, Replays(), labels=["species", "plate"], row_bytes=self.ROW_BYTES,
            floor=floor, seed=seed, **options,
        )  # fmt: skip
        assert found.seconds <= options["budget"] * 1.1
        for each in found.asked:
            assert self.share(each) >= floor - 0.001, each
            assert self.bytes_of(each) <= options["memory"], each
        return found

    @pytest.mark.slow
    def test_the_choice_is_near_the_best_and_beats_the_default_grid(self, of_ranges):
        grid = Space.of(BLOCKS, FETCHES, (0, 1, 2, 4, 8))
        assert self.speed(of_ranges.chosen) >= 0.95 * self.fastest()[0]
        assert self.speed(of_ranges.chosen) > self.speed(self.searched(grid).chosen)

    @pytest.mark.slow
    def test_few_pairs_of_sizes_are_replayed(self, of_ranges):
        coarse = {each.plan_settings for each in self.RANGES.coarse_grid()}
        n_replayed = len(of_ranges.entropies)
        assert of_ranges.search.n_considered > len(coarse)
        assert n_replayed < len(coarse) + 2 * len(of_ranges.results)
        assert {each.configuration for each in of_ranges.results} == set(of_ranges.asked)

    @pytest.mark.parametrize(
        ("part", "seed"),
        [
            (0.6, 1),
            *(
                pytest.param(*each, marks=pytest.mark.slow)
                for each in ((0.4, 0), (0.8, 0), (0.8, 2))
            ),
        ],
    )
    def test_with_a_need_what_mixes_best_of_the_fast_ones_is_looked_for(self, part, seed):
        need = part * self.fastest()[0]
        found = self.searched(self.RANGES, seed, need=need, budget=60.0)
        assert self.speed(found.chosen) >= 0.95 * need
        assert self.share(found.chosen) >= self.fastest(least_speed=need)[1] - 0.015
        assert len(found.entropies) < 200

    def test_where_nothing_of_the_coarse_grid_is_feasible_proposals_find_what_is(self):
        space, floor = Space.of(range(20, 410), range(8, 501), range(9)), 0.996
        memory = int(2 * 250 * BATCH_SIZE * self.ROW_BYTES)  # while one is dealt out, one is read

        def is_feasible(each):
            return self.share(each) >= floor - 0.001 and self.bytes_of(each) <= memory

        assert not any(map(is_feasible, space.coarse_grid()))
        found = self.searched(space, floor=floor, memory=memory, budget=600.0)
        assert is_feasible(found.chosen)


@pytest.fixture(scope="module")
def of_ranges():
    return TestRanges().searched(TestRanges.RANGES)


class TestManyRuns:
    """What searches say of a noisy machine, as often as they say it."""

    GRID = tuple(
        Configuration(block_size=b, fetch_factor=f, num_workers=w)
        for b, f, w in product((4, 16, 64, 256), (4, 16, 64, 256), (0, 2))
    )
    N_RUNS, N_CELLS = 100, 1_000_000

    @staticmethod
    def cost(each):
        """A price per fetch, block and cell, where workers help little."""
        cells = each.fetch_factor * BATCH_SIZE
        blocks = max(1, cells / each.block_size)
        return (0.01 + 1e-4 * blocks + 1e-5 * cells) / (1 + 0.05 * each.num_workers) / cells

    @pytest.mark.slow
    @pytest.mark.parametrize("drift", [0.0, 0.01], ids=["quiet", "drifting"])
    def test_choices_and_intervals_hold_as_often_as_they_say(self, drift):
        """Of all rivals; turns cancel the drift. Measuring again is at the load of the end."""
        least = min(self.cost(each) for each in self.GRID if share(each) >= 0.95)
        near, held, ratios_held = [], [], []
        for seed in range(self.N_RUNS):
            machine = Machine(
                self.cost, self.N_CELLS, overhead=2.0, noise=0.05, drift=drift, seed=seed
            )
            found = searched(machine, self.GRID, ENTROPIES, seed=seed)
            assert found.seconds <= 1.1 * 60
            assert len(found.asked) >= 8
            assert found.choice is not None
            own, speed = 1 / self.cost(found.chosen), found.choice.speed
            assert speed is not None
            near.append(own >= 0.95 / least)
            held.append(speed.low <= own * np.exp(-machine.log_load) <= speed.high)
            for rival in found.choice.rivals:
                true = own * self.cost(rival.configuration)
                ratios_held.append(rival.ratio.low <= true <= rival.ratio.high)
        assert np.mean(near) >= 0.95
        assert np.mean(held) >= 0.90
        assert len(ratios_held) >= self.N_RUNS / 2
        assert 0.90 <= np.mean(ratios_held) <= 0.99
