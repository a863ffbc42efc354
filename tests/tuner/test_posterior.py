"""What is believed of configurations: their space, a model of their costs, and comparisons."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cellfeed import ParameterError
from cellfeed_tuner import Configuration, Estimate, Rival
from cellfeed_tuner._choose import fastest
from cellfeed_tuner._searching._cost_model import (
    CostModel,
    Geometry,
    Observations,
    Space,
    distinct,
    draws_of,
)
from cellfeed_tuner._searching._posterior import Posterior, Replicate, TurnsOf


class TestSpace:
    LARGE = Space.of(range(1, 4097), range(1, 101), range(17))

    def test_a_grid_is_every_combination_once_in_order(self):
        space = Space.of([16, 4, 4], [8], [1, 0], workers=(1, 2), block_sizes=("a",))
        assert not space.is_large
        assert space.others == {"workers": (1, 2), "block_sizes": ("a",)}
        found = [(e.block_size, e.num_workers, e["workers"]) for e in space.grid()]
        assert found == list(product((4, 16), (0, 1), (1, 2)))

    def test_ranges_are_counted_and_not_listed(self):
        space = Space.of(range(1, 10**9), range(1, 10**6), [0])
        assert space.size == (10**9 - 1) * (10**6 - 1)
        assert space.is_large
        assert Configuration(block_size=123_456_789, fetch_factor=77) in space
        assert Configuration(block_size=1, fetch_factor=1, num_workers=1) not in space
        assert len(space.coarse_grid()) < 500
        assert Space.of(range(8, 0, -1), [1], [0]) == Space.of(range(1, 9), [1], [0])

    def test_the_coarse_grid_holds_both_ends_and_powers_of_four(self):
        grid = self.LARGE.coarse_grid()
        assert sorted({each.block_size for each in grid}) == [1, 4, 16, 64, 256, 1024, 4096]
        assert sorted({each.fetch_factor for each in grid}) == [1, 4, 16, 64, 100]
        assert sorted({each.num_workers for each in grid}) == [0, 1, 2, 4, 8, 16]
        assert len(grid) == 7 * 5 * 6
        of_list = Space.of([5 * each for each in range(1, 101)], range(1, 101), [0])
        assert {each.block_size for each in of_list.coarse_grid()} == {5, 15, 65, 255, 500}

    @pytest.mark.parametrize(
        ("asked", "given"),
        [(1, 1), (13, 13), (19, 20), (100, 96), (1000, 1024), (4095, 4096), (4096, 4096)],
    )
    def test_proposals_are_rounded_and_stay_within(self, asked, given):
        found = self.LARGE.nearest(block_size=asked, fetch_factor=99, num_workers=5)
        assert found == Configuration(block_size=given, fetch_factor=96, num_workers=5)
        assert found in self.LARGE

    def test_other_settings_and_lists_are_part_of_it(self):
        space = Space.of(
            [3, 300], range(1, 4097), [0, 4], align=["chunks", None], num_threads=[4, 1]
        )
        assert space.size == 2 * 4096 * 2 * 2 * 2
        assert {each["align"] for each in space.coarse_grid()} == {"chunks", None}
        assert {each["num_threads"] for each in space.coarse_grid()} == {1, 4}
        settings = {"num_workers": 3, "align": None, "num_threads": 3}
        found = space.nearest(block_size=100, fetch_factor=77, **settings)
        assert found in space
        assert list(found.values()) == [300, 80, 4, None, 4]
        assert Configuration(block_size=3, fetch_factor=1) not in space

    @pytest.mark.parametrize(
        ("sizes", "said"),
        [
            (([], [1], [0]), "at least one value"),
            ((range(1, 1), [1], [0]), "at least one value"),
            (([1], [1], []), "at least one value"),
            ((range(9), [1], [0]), "must hold"),
            (([1], [0, 1], [0]), "must hold"),
            (([1], [1], [-1, 0]), "must hold"),
        ],
    )
    def test_sizes_that_cannot_be_are_refused(self, sizes, said):
        with pytest.raises(ParameterError, match=said):
            Space.of(*sizes)


class TestCostModel:
    BATCH_SIZE = 64
    GRID = tuple(
        Configuration(block_size=b, fetch_factor=f, num_workers=w)
        for b, f, w in product((1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256), (0, 1, 2, 4))
    )

    def cost(self, each, *, fetch=0.01, block=2e-4, cell=1e-5):
        cells = self.BATCH_SIZE * each.fetch_factor
        blocks = max(1, cells / each.block_size)
        return (fetch + block * blocks + cell * cells) / cells / max(1, each.num_workers)

    def drawn(self, seconds, error=0.01, n_draws=200, grid=GRID, geometry=None):
        """Draws of costs after observing some, with the same relative error."""
        model = CostModel(list(grid), self.BATCH_SIZE, geometry or Geometry())
        logs = np.log(np.array(list(seconds.values())))
        seen = Observations(list(seconds), logs, error**2 * np.eye(len(seconds)))
        draws = draws_of(*model.posterior(seen), n_draws, np.random.default_rng(0))
        return dict(zip(grid, np.exp(draws).T, strict=True))

    def test_different_pieces_are_counted_as_chance_has_it(self):
        drawn = np.random.default_rng(0).integers(0, 14, (20_000, 20))
        n_different = np.mean([np.unique(each).size for each in drawn])
        assert distinct(14, np.array([20.0])) == pytest.approx(n_different, rel=0.005)
        (found,) = distinct(10, np.array([3.0]), 2.5)  # of each of which some are touched
        assert 0 < found <= 7.5

    @pytest.mark.parametrize("workers", [(0, 1, 2, 4), (0,), (2,)])
    def test_a_sum_of_costs_is_known_from_a_few_samples(self, workers):
        grid = [each for each in self.GRID if each.num_workers in workers]
        probes = [grid[k] for k in np.random.default_rng(1).choice(len(grid), 16, replace=False)]
        found = self.drawn({each: self.cost(each) for each in probes}, grid=grid)
        wrong = [np.median(draws) / self.cost(each) for each, draws in found.items()]
        assert np.quantile(np.abs(np.log(wrong)), 0.9) < 0.25

    def test_samples_override_the_sum(self):
        odd = self.GRID[70]
        seen = {each: self.cost(each) for each in self.GRID[::9]} | {odd: 3 * self.cost(odd)}
        assert np.median(self.drawn(seen)[odd]) == pytest.approx(3 * self.cost(odd), rel=0.1)

    def test_a_slow_small_fetch_of_a_worker_says_nothing_of_what_workers_add_to_each_cell(self):
        """It is slow since it is small: 200 times as slow by cell as the large fetch."""
        large = Configuration(block_size=64, fetch_factor=256)
        small = Configuration(block_size=1, fetch_factor=1)
        seen = {small: 0.03, small.changed(num_workers=1): 0.03, large: 1.5e-4}
        found = self.drawn(seen, 0.05)
        with_workers = found[large.changed(num_workers=4)]
        assert np.median(with_workers) < 4 * np.median(found[large])

    def test_what_is_far_from_all_samples_is_less_certain(self):
        near = Configuration(block_size=16, fetch_factor=16)
        found = self.drawn({near: self.cost(near)})
        spread = {each: np.log(draws).std() for each, draws in found.items()}
        apart = Configuration(block_size=16, fetch_factor=64)
        assert spread[near] < 0.05
        assert spread[apart] > spread[near]
        far = Configuration(block_size=1, fetch_factor=1, num_workers=4)
        assert spread[far] > 1.5 * spread[apart]

    @given(
        samples=st.dictionaries(
            st.integers(0, len(GRID) - 1), st.floats(1e-7, 10), min_size=0, max_size=12
        ),
        geometry=st.sampled_from(
            [
                Geometry(),
                Geometry(n_cells=10**6, rows_per_chunk=12.5, n_files=14),
                Geometry(n_cells=100, rows_per_chunk=0.2, n_files=1),
            ]
        ),
    )
    @example(
        samples={1: 0.125, 10: 1.0, 2: 1.0, 3: 1.0},
        geometry=Geometry(n_cells=10**6, rows_per_chunk=12.5, n_files=14),
    )
    @example(samples={}, geometry=Geometry())
    def test_any_samples_and_any_storage_give_finite_costs(self, samples, geometry):
        seconds = {self.GRID[place]: each for place, each in samples.items()}
        found = self.drawn(seconds, 0.05, 8, geometry=geometry)
        assert all(np.isfinite(np.log(each)).all() for each in found.values())
        if not samples:  # large blocks and fetches are thought to be fast
            small, large = (Configuration(block_size=n, fetch_factor=n) for n in (1, 256))
            assert np.median(found[small]) > np.median(found[large])

    def test_ranks_divide_an_epoch(self):
        """A fourth of the cells has as few fetches, of which the first is not read ahead."""
        part, divided, whole = (
            CostModel(self.GRID, 64, Geometry(n_cells=n_cells, n_ranks=n_ranks)).mean()
            for n_cells, n_ranks in ((10**5, 1), (4 * 10**5, 4), (4 * 10**5, 1))
        )
        assert np.array_equal(part, divided)
        assert np.all(whole <= divided)
        assert np.any(whole < divided)


GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b, f, w in product((1, 4, 16, 64, 256), (1, 4, 16, 64), (0, 1, 2))
]


def cost(each):
    blocks = 1 / min(each.block_size, 64 * each.fetch_factor)
    return (blocks + 1 / each.fetch_factor + 0.1) * 1e-4 * (1 + 0.3 * each.num_workers)


def posterior_of(goal_of=lambda them: fastest):
    return Posterior(GRID, GRID, batch_size=64, geometry=Geometry(), goal_of=goal_of, seed=0)


def replicates(*costs):
    """Replicates of different turns."""
    return [Replicate(each, turn) for turn, each in enumerate(costs)]


class TestPosterior:
    def test_chances_are_of_all_that_may_be_chosen(self):
        posterior, new = posterior_of(), Configuration(block_size=1024, fetch_factor=256)
        for each in GRID[::7]:
            posterior.tell(each, replicates(cost(each), 1.05 * cost(each)))
        posterior.add([new, GRID[0]])
        assert posterior.candidates == [*GRID, new]
        chances = posterior.chances()
        assert chances.keys() == {*GRID, new}
        assert sum(chances.values()) == pytest.approx(1)
        assert list(chances.values()) == sorted(chances.values(), reverse=True)
        posterior.withdraw(new)
        posterior.tell(GRID[0], [])  # it failed
        assert not {new, GRID[0]} & {*posterior.candidates, *posterior.chances()}

    @pytest.mark.parametrize("noise", [0.02, 0.15])
    def test_how_much_looks_differ_is_found_from_few_even_where_none_was_repeated(self, noise):
        """Over many searches, within a factor of two."""
        rng, model = np.random.default_rng(0), posterior_of()._model

        def looks():
            some = GRID[-30::3]
            return {
                e: [cost(e) * np.exp(noise * rng.standard_normal()) for _ in "ab"] for e in some
            }

        found = [model.fit(looks()).spread for _ in range(20)]
        assert noise / 2 < np.median(found) < 2 * noise

    @pytest.mark.parametrize("seed", range(3))
    def test_costs_that_have_nothing_in_common_contradict_the_model(self, seed):
        """Costs of six configurations; and the same costs, each of another of all."""
        rng = np.random.default_rng(seed)
        costs = {each: cost(each) for each in GRID}
        exchanged = dict(zip(GRID, rng.permutation(list(costs.values())), strict=True))
        chances = []
        for truth, is_contradicted in ((costs, False), (exchanged, True)):
            posterior = posterior_of()
            assert not posterior.is_contradicted
            assert posterior.chance_of_faster(GRID[0]) == 0.0  # before any measurement
            expected = posterior.most_promising(GRID)
            seen = [expected, *(GRID[k] for k in rng.choice(len(GRID), 5, replace=False))]
            for each in seen:
                looks = truth[each] * np.exp(0.02 * rng.standard_normal(2))
                posterior.tell(each, replicates(*looks))
            assert posterior.is_contradicted == is_contradicted
            chances.append(posterior.chance_of_faster(min(seen, key=truth.__getitem__)))
        assert 0 <= chances[0] < 1 / 3 < chances[1] <= 1

    def test_nothing_unmeasured_is_faster_where_all_is_measured(self):
        posterior = posterior_of()
        assert posterior.ratio(GRID[0], GRID[1]) is posterior.speed(GRID[0]) is None
        for each in GRID:
            posterior.tell(each, replicates(cost(each)))
        assert posterior.chance_of_faster(GRID[0]) == 0.0

    def test_what_a_turn_does_to_all_alike_changes_no_ratio(self):
        """One was measured while the machine was three times as slow, beside others."""
        posterior, some, rng = posterior_of(), GRID[::6], np.random.default_rng(0)
        for place, each in enumerate(some):
            turns = [turn for turn in range(6) if place != 1 or turn % 2]
            looks = [(3.0 if turn % 2 else 1.0) * cost(each) for turn in turns]
            looks *= np.exp(0.02 * rng.standard_normal(len(turns)))
            posterior.tell(each, list(map(Replicate, looks, turns)))
        ratio, back = (posterior.ratio(*pair) for pair in (some[1::-1], some[:2]))
        true = cost(some[0]) / cost(some[1])
        assert ratio.value == pytest.approx(true, rel=0.1)
        assert ratio.low <= true <= ratio.high
        assert (back.low, back.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))


class TestTurns:
    """What the moment does is far larger than what is to be found."""

    A, B, C = (Configuration(block_size=size, fetch_factor=16) for size in (1, 4, 16))

    def turns(self, n, *, noise=0.02, left=None, seed=0):
        rng, turns = np.random.default_rng(seed), TurnsOf[Configuration]()
        speeds = {self.A: 1000.0, self.B: 1100.0, self.C: 1600.0}
        for number in range(n):
            there = [each for each in speeds if each != left or number < n // 3]
            errors = 0.3 * rng.standard_normal() + noise * rng.standard_normal(len(there))
            turns.add({e: speeds[e] * x for e, x in zip(there, np.exp(errors), strict=True)})
        return turns

    def test_the_moment_changes_no_ratio_and_one_way_is_the_inverse_of_the_other(self):
        ratio = self.turns(4, noise=0.0).ratio(self.B, self.A)
        assert [ratio.value, ratio.low, ratio.high] == pytest.approx([1.1] * 3)
        there, back = (self.turns(5).ratio(*pair) for pair in ((self.A, self.C), (self.C, self.A)))
        inverse = [1 / back.value, 1 / back.high, 1 / back.low]
        assert [there.value, there.low, there.high] == pytest.approx(inverse)
        assert self.turns(1).ratio(self.A, self.B) is None  # one turn says nothing

    def test_finalists_are_what_was_in_most_turns_the_fastest_first(self):
        turns = self.turns(9)
        assert turns.finalists() == [self.C, self.B, self.A]
        assert self.turns(9, left=self.C).finalists() == [self.B, self.A]
        turns.forget(self.C)
        assert (turns.finalists(), turns.count(self.C), len(turns)) == ([self.B, self.A], 0, 9)
        assert TurnsOf[Configuration]().finalists() == []

    @pytest.mark.parametrize(
        ("ratio", "undecided"),
        [
            (Estimate(1.1, 1.02, 1.18), False),
            (Estimate(0.9, 0.85, 0.95), False),
            (Estimate(1.0, 0.99, 1.01), False),  # as fast as each other
            (Estimate(1.1, 0.95, 1.27), True),
            (Estimate(1.01, 0.97, 1.05), True),
        ],
    )
    def test_a_rival_is_undecided_where_the_interval_leaves_open_which_is_faster(
        self, ratio, undecided
    ):
        assert Rival(configuration=self.A, ratio=ratio, n_turns=4).is_undecided == undecided
