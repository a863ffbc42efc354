"""The space that is searched, and what measurements say of all of it."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from cellfeed import ParameterError
from cellfeed_tuner import Configuration, Estimate
from cellfeed_tuner._interval import is_undecided
from cellfeed_tuner._searching._model import Model, Replicate
from cellfeed_tuner._searching._space import Space


class TestSpace:
    LARGE = Space.of(range(1, 4097), range(1, 101), range(17))

    def test_a_grid_is_every_combination_once_in_order(self):
        space = Space.of([16, 4, 4], [8], [1, 0], workers=(1, 2), block_sizes=("a",))
        assert not space.is_large
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

    def test_around_a_configuration_are_sizes_of_the_space_and_a_worker_more_or_less(self):
        found = self.LARGE.around(Configuration(block_size=16, fetch_factor=64, num_workers=5))
        assert all(each in self.LARGE for each in found)
        sizes = {(each.block_size, each.fetch_factor) for each in found}
        assert {(8, 32), (32, 100), (11, 64), (23, 64), (16, 45), (16, 91)} <= sizes
        assert {each.num_workers for each in found} == {4, 5, 6}
        at_the_end = self.LARGE.around(Configuration(block_size=4096, fetch_factor=100))
        assert at_the_end
        assert all(each in self.LARGE for each in at_the_end)

    def test_other_settings_and_lists_are_part_of_it(self):
        space = Space.of(
            [3, 300], range(1, 4097), [0, 4], align=["chunks", None], num_threads=[4, 1]
        )
        assert space.size == 2 * 4096 * 2 * 2 * 2
        assert {each["align"] for each in space.coarse_grid()} == {"chunks", None}
        assert {each["num_threads"] for each in space.coarse_grid()} == {1, 4}
        near = Configuration(
            block_size=300, fetch_factor=64, num_workers=4, align=None, num_threads=4
        )
        assert all(each in space for each in space.around(near))
        assert {each["num_threads"] for each in space.around(near)} == {4}
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


GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b, f, w in product((1, 4, 16, 64, 256), (1, 4, 16, 64), (0, 1, 2))
]


def cost(each):
    blocks = 1 / min(each.block_size, 64 * each.fetch_factor)
    return (blocks + 1 / each.fetch_factor + 0.1) * 1e-4 * (1 + 0.3 * each.num_workers)


def model_of(costs, *, noise=0.02, n=1, seed=0, **goal):
    """What is known after ``n`` replicates of each, all in turns of their own."""
    model, rng = Model(GRID, GRID, **goal), np.random.default_rng(seed)
    for number, (each, seconds) in enumerate(costs.items()):
        looks = seconds * np.exp(noise * rng.standard_normal(n))
        model.tell(each, [Replicate(look, n * number + i) for i, look in enumerate(looks)])
    return model


class TestModel:
    PAIRS = tuple(each for each in GRID if not each.num_workers)

    def test_nothing_is_known_before_any_measurement(self):
        model = model_of({})
        assert model.leader is None
        assert (model.prospects(), model.seconds_per_cell()) == ({}, {})
        assert model.ratio(GRID[0], GRID[1]) is model.speed(GRID[0]) is None
        assert model.chance_of_faster(GRID[0]) == 0.0

    def test_what_was_not_timed_is_predicted_from_its_neighbours(self):
        hidden = Configuration(block_size=16, fetch_factor=16)
        model = model_of({each: cost(each) for each in self.PAIRS if each != hidden})
        found = model.speed(hidden)
        assert found.value == pytest.approx(1 / cost(hidden), rel=0.25)
        assert found.low < 1 / cost(hidden) < found.high

    def test_what_is_far_from_all_that_was_timed_is_less_certain(self):
        model = model_of({each: cost(each) for each in self.PAIRS[:2]}, n=2)

        def width(each):
            return np.log(model.speed(each).high / model.speed(each).low)

        near, far = (Configuration(block_size=b, fetch_factor=f) for b, f in ((1, 16), (256, 64)))
        assert width(self.PAIRS[0]) < width(near) < width(far)

    def test_what_is_added_later_is_predicted_as_if_it_had_been_there(self):
        workers = [each for each in GRID if each.num_workers]
        found = []
        for first, later in ((self.PAIRS, workers), ([*self.PAIRS, *workers], ())):
            model = Model(first, first)
            for turn, each in enumerate(self.PAIRS[::2]):
                model.tell(each, [Replicate(cost(each), turn)])
            assert model.leader is not None
            model.add(later)
            found.append(model.seconds_per_cell())
        assert list(found[0]) == [*self.PAIRS, *workers]
        assert found[0] == pytest.approx(found[1])

    @pytest.mark.parametrize("seed", range(3))
    def test_where_nothing_is_alike_neighbours_say_nothing(self, seed):
        """Costs, and the same costs exchanged at random."""
        rng = np.random.default_rng(seed)
        costs = [cost(each) for each in self.PAIRS]
        exchanged = rng.permutation(costs).tolist()
        hidden = self.PAIRS[7]

        def width(costs):
            timed = dict(zip(self.PAIRS, costs, strict=True))
            del timed[hidden]
            speed = model_of(timed).speed(hidden)
            return np.log(speed.high / speed.low)

        assert 3 * width(costs) < width(exchanged)

    def test_another_thing_with_other_settings_is_another(self):
        """How much threads change is not known from one number of them."""
        others: list[Any] = [each.changed(num_threads=n) for n in (1, 2) for each in self.PAIRS]
        model = Model(others, others)
        for turn, each in enumerate(others[: len(self.PAIRS)]):
            model.tell(each, [Replicate(cost(each), turn)])
        ratio = model.ratio(others[0], others[len(self.PAIRS)])
        assert ratio is not None
        assert ratio.low < 0.7
        assert ratio.high > 1.4

    @pytest.mark.parametrize("noise", [0.02, 0.15])
    def test_how_much_replicates_differ_is_found(self, noise):
        """Over many searches, a ratio is as uncertain as it should be, within a factor of two."""
        costs = {each: cost(each) for each in GRID[::6]}
        first, second = GRID[:12:6]
        found = []
        for seed in range(10):
            ratio = model_of(costs, noise=noise, n=6, seed=seed).ratio(first, second)
            found.append(np.log(ratio.high / ratio.low) / 2)
        expected = 1.96 * noise * np.sqrt(2 / 6)
        assert expected / 2 < np.median(found) < 2 * expected

    def test_the_same_replicates_say_the_same(self):
        costs = {each: cost(each) for each in GRID[::5]}
        first, again = (model_of(costs, n=2).seconds_per_cell() for _ in range(2))
        assert first == again

    def test_what_a_turn_does_to_all_alike_changes_no_ratio(self):
        """One was measured while the machine was three times as slow, beside others."""
        model, some = Model(GRID, GRID), GRID[::6]
        rng = np.random.default_rng(0)
        for place, each in enumerate(some):
            turns = [turn for turn in range(6) if place != 1 or turn % 2]
            looks = [(3.0 if turn % 2 else 1.0) * cost(each) for turn in turns]
            looks *= np.exp(0.02 * rng.standard_normal(len(turns)))
            model.tell(each, list(map(Replicate, looks, turns)))
        ratio, back = model.ratio(some[1], some[0]), model.ratio(some[0], some[1])
        assert ratio is not None
        assert back is not None
        true = cost(some[0]) / cost(some[1])
        assert ratio.value == pytest.approx(true, rel=0.1)
        assert ratio.low <= true <= ratio.high
        assert (back.low, back.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))

    def test_the_leader_and_what_may_surpass_it(self):
        model = model_of({each: cost(each) for each in GRID}, n=4, noise=0.05)
        best = min(GRID, key=cost)
        assert cost(model.leader) == pytest.approx(cost(best), rel=0.1)
        prospects = model.prospects()
        assert prospects.keys() == {*GRID} - {model.leader}
        for each, (chance, gain) in prospects.items():
            assert 0 <= chance <= 0.5
            assert gain >= 0
            if cost(each) > 2 * cost(best):
                assert chance < 1e-6
        assert model.chance_of_faster(model.leader) == 0.0  # all were timed

    def test_candidates_come_and_go(self):
        model, new = model_of({each: cost(each) for each in GRID[::7]}), Configuration(
            block_size=1024, fetch_factor=256
        )  # fmt: skip
        model.add([new, GRID[0]])
        assert model.candidates == [*GRID, new]
        assert 0 < model.chance_of_faster(GRID[0]) <= 1
        model.withdraw(new)
        model.tell(GRID[0], [])  # it failed
        assert not {new, GRID[0]} & {*model.candidates, *model.prospects(), model.leader}

    def test_with_a_need_the_best_mixed_that_is_fast_enough_leads(self):
        need = 1 / cost(Configuration(block_size=16, fetch_factor=16)) / 1.2
        mixing = {each: 1 - each.block_size / 1e4 for each in GRID}

        costs = {each: cost(each) for each in GRID}
        model = model_of(costs, n=3, need=need, worth=mixing.__getitem__)
        enough = [each for each in GRID if 1 / cost(each) >= need]
        assert mixing[model.leader] == max(mixing[each] for each in enough)


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
def test_it_is_undecided_where_the_interval_leaves_open_which_is_faster(ratio, undecided):
    assert is_undecided(ratio) == undecided
