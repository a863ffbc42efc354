"""The rule, on grids made by hand."""

from dataclasses import replace

import pytest

from cellfeed_tuner import (
    Configuration,
    ConfigurationResult,
    Constraints,
    EntropyBits,
    Estimate,
    LabelResult,
)
from cellfeed_tuner._choose import Ordering, choose, nearest
from cellfeed_tuner._interval import is_undecided

CONSTRAINTS = Constraints(entropy_floor=0.95, memory_bytes=1000, need_cells_per_second=None)


def mixed(share):
    bits = share * 3.0
    return LabelResult(entropy_bits=EntropyBits(expected=Estimate(bits, bits, bits), random=3.0))


def result(block_size, speed, *, share=1.0, memory=100, workers=0, spread=1.0):
    return ConfigurationResult(
        configuration=Configuration(block_size=block_size, fetch_factor=1, num_workers=workers),
        status="timed",
        cells_per_second=Estimate(speed, speed - spread, speed + spread),
        labels={"plate": mixed(share)},
        peak_memory_bytes=memory,
    )


ALONE = Ordering.of([])
"""Nothing was compared with anything."""


def chosen_block(results, constraints=CONSTRAINTS, ordering=ALONE):
    choice = choose(results, constraints, ordering)
    return choice and choice.result.configuration.block_size


def test_the_fastest_that_mixes_well_enough_is_chosen():
    grid = [result(1, 10), result(2, 50), result(3, 90, share=0.94)]
    assert chosen_block(grid) == 2


def test_of_those_that_cannot_be_told_apart_the_cheapest_is_chosen():
    grid = [result(1, 50, memory=300), result(2, 49, memory=200), result(3, 40, memory=100)]
    assert chosen_block(grid) == 2


def test_at_equal_memory_fewer_workers_are_cheaper():
    assert chosen_block([result(1, 50, workers=2), result(2, 50, workers=1)]) == 2


def test_of_those_as_cheap_the_best_mixed_is_chosen():
    grid = [
        result(1, 50, memory=100, share=0.96),
        result(2, 50, memory=104, share=0.99),
        result(3, 50, memory=110, share=1.0),
        result(4, 50, memory=103, share=1.0, workers=1),
    ]
    choice = choose(grid, CONSTRAINTS, ALONE)
    assert choice is not None
    assert choice.result.configuration.block_size == 2
    assert "mixes best of those" in choice.reason


def test_memory_is_a_limit():
    assert chosen_block([result(1, 10), result(2, 50, memory=2000)]) == 1


def test_what_was_not_measured_is_never_chosen():
    untimed = ConfigurationResult(
        configuration=Configuration(block_size=9, fetch_factor=1),
        status="too long",
        labels={"plate": mixed(1.0)},
    )
    assert chosen_block([untimed]) is None
    assert nearest([untimed], CONSTRAINTS) is None
    assert chosen_block([untimed, result(1, 10)]) == 1


def test_with_a_need_the_best_mixed_that_is_fast_enough_is_chosen():
    need = Constraints(entropy_floor=0.95, memory_bytes=1000, need_cells_per_second=30)
    grid = [result(1, 10), result(2, 40, share=0.99), result(3, 90, share=0.96)]
    assert chosen_block(grid, need) == 2


def test_a_need_must_be_met_by_the_low_end_of_the_interval():
    need = Constraints(entropy_floor=0.95, memory_bytes=1000, need_cells_per_second=30)
    assert chosen_block([result(1, 31, spread=5), result(2, 40, share=0.96)], need) == 2


@pytest.mark.parametrize(
    ("grid", "block_size", "problem"),
    [
        ([result(1, 50, share=0.9), result(2, 90, share=0.5)], 1, "below the floor of 0.95"),
        ([result(1, 50, memory=1100), result(2, 90, memory=9000)], 1, "more than the 0 MB given"),
    ],
)
def test_where_nothing_is_feasible_the_nearest_is_named(grid, block_size, problem):
    assert choose(grid, CONSTRAINTS, ALONE) is None
    closest = nearest(grid, CONSTRAINTS)
    assert closest is not None
    assert closest.configuration.block_size == block_size
    assert problem in closest.problem


def test_where_nothing_is_fast_enough_the_fastest_is_the_nearest():
    need = Constraints(entropy_floor=0.95, memory_bytes=1000, need_cells_per_second=1000)
    closest = nearest([result(1, 50), result(2, 90)], need)
    assert closest is not None
    assert closest.configuration.block_size == 2
    assert "below the 1,000 needed" in closest.problem


def with_further(each, share):
    return replace(each, labels={**each.labels, "cell_line": mixed(share)})


def test_every_label_has_to_be_mixed_well_enough():
    grid = [with_further(result(1, 10), 0.96), with_further(result(2, 50), 0.94)]
    choice = choose(grid, CONSTRAINTS, ALONE)
    assert choice is not None
    assert choice.result.configuration.block_size == 1
    found = nearest(grid[1:], CONSTRAINTS)
    assert found is not None
    assert found.problem.startswith("its entropy of cell_line is 0.940 of random sampling's, below")


def test_with_a_need_the_best_mixed_is_so_by_its_least_mixed_label():
    grid = [with_further(result(1, 50, share=1.0), 0.96), with_further(result(2, 50), 0.99)]
    needy = replace(CONSTRAINTS, need_cells_per_second=40.0)
    assert chosen_block(grid, needy) == 2


def in_turns(**speeds_by_block):
    """Six turns of configurations with these block sizes, which tell 3 % apart."""
    speeds = {
        Configuration(block_size=int(block.removeprefix("b")), fetch_factor=1): speed
        for block, speed in speeds_by_block.items()
    }

    def ratio(one, other):
        if one == other:
            return Estimate(1.0, 1.0, 1.0)
        if not {one, other} <= speeds.keys():
            return None
        found = speeds[one] / speeds[other]
        return Estimate(found, 0.97 * found, 1.03 * found)

    return Ordering(ratio, lambda one, other: 6 * ({one, other} <= speeds.keys()))


class TestOrdering:
    def test_what_was_lucky_alone_is_not_chosen(self):
        grid = [result(1, 90), result(2, 50), result(3, 55)]
        choice = choose(grid, CONSTRAINTS, in_turns(b1=45, b2=60, b3=50))
        assert choice is not None
        assert choice.configuration.block_size == 2
        assert choice.basis == "compared"
        assert [each.configuration.block_size for each in choice.rivals] == [3, 1]
        assert choice.rivals[0].ratio.value == pytest.approx(1.2, rel=0.03)
        assert "The fastest of the 3 timed configurations" in choice.reason

    def test_what_had_no_turn_is_chosen_if_it_is_the_fastest(self):
        grid = [result(1, 50), result(2, 40), result(3, 120)]
        choice = choose(grid, CONSTRAINTS, in_turns(b1=50, b2=40))
        assert choice is not None
        assert choice.configuration.block_size == 3
        assert (choice.basis, choice.rivals) == ("timed", ())

    def test_a_ratio_tells_apart_what_intervals_do_not(self):
        grid = [result(1, 50, spread=20, memory=50), result(2, 50, spread=20)]
        assert chosen_block(grid) == 1
        choice = choose(grid, CONSTRAINTS, in_turns(b1=50, b2=60))
        assert choice is not None
        assert choice.configuration.block_size == 2
        assert not is_undecided(choice.rivals[0].ratio)

    def test_what_is_not_feasible_is_no_rival(self):
        grid = [result(1, 50, memory=2000), result(2, 40), result(3, 30)]
        choice = choose(grid, CONSTRAINTS, in_turns(b1=50, b2=40, b3=30))
        assert choice is not None
        assert choice.configuration.block_size == 2
        assert [each.configuration.block_size for each in choice.rivals] == [3]

    @pytest.mark.parametrize("high", [1.01, 2.5])
    def test_the_fastest_is_so_clearly_unless_another_may_be_faster(self, high):
        """Also if that was never in a turn with it."""
        results = [result(1, 55), result(2, 50)]
        own, other = (each.configuration for each in results)
        relative = {own: Estimate(1.0, 1.0, 1.0), other: Estimate(0.9, 0.8, 0.9 * high)}
        ordering = Ordering.of(
            replace(each, relative=relative[each.configuration]) for each in results
        )
        choice = choose(results, CONSTRAINTS, ordering)
        assert choice is not None
        assert choice.configuration == own
        assert ("though not clearly" in choice.reason) == (high > 2)
