"""What may be chosen, listed or not."""

import pytest

from cellfeed import ParameterError
from cellfeed_tuner import Configuration
from cellfeed_tuner._searching._cost_model import Space

LARGE = Space.of(range(1, 4097), range(1, 101), range(17))


def test_a_grid_is_every_combination_once_in_order():
    space = Space.of([16, 4, 4], [8], [1, 0])
    assert not space.is_large
    assert [(each.block_size, each.fetch_factor, each.num_workers) for each in space.grid()] == [
        (4, 8, 0), (4, 8, 1), (16, 8, 0), (16, 8, 1),
    ]  # fmt: skip


def test_ranges_are_counted_and_not_listed():
    space = Space.of(range(1, 10**9), range(1, 10**6), [0])
    assert space.size == (10**9 - 1) * (10**6 - 1)
    assert space.is_large
    assert Configuration(block_size=123_456_789, fetch_factor=77) in space
    assert Configuration(block_size=1, fetch_factor=1, num_workers=1) not in space
    assert len(space.coarse_grid()) < 500


def test_a_range_downwards_is_the_same():
    assert Space.of(range(8, 0, -1), [1], [0]) == Space.of(range(1, 9), [1], [0])


def test_the_coarse_grid_holds_both_ends_and_powers_of_four():
    grid = LARGE.coarse_grid()
    assert sorted({each.block_size for each in grid}) == [1, 4, 16, 64, 256, 1024, 4096]
    assert sorted({each.fetch_factor for each in grid}) == [1, 4, 16, 64, 100]
    assert sorted({each.num_workers for each in grid}) == [0, 1, 2, 4, 8, 16]
    assert len(grid) == 7 * 5 * 6


def test_of_a_long_list_the_coarse_grid_takes_what_is_nearest():
    sizes = [5 * each for each in range(1, 101)]
    space = Space.of(sizes, range(1, 101), [0])
    assert {each.block_size for each in space.coarse_grid()} == {5, 15, 65, 255, 500}


@pytest.mark.parametrize(
    ("asked", "given"),
    [(1, 1), (13, 13), (19, 20), (100, 96), (1000, 1024), (4095, 4096), (4096, 4096)],
)
def test_proposals_are_rounded_and_stay_within(asked, given):
    found = LARGE.nearest(block_size=asked, fetch_factor=99, num_workers=5)
    assert found == Configuration(block_size=given, fetch_factor=96, num_workers=5)
    assert found in LARGE


def test_proposals_are_taken_from_lists():
    space = Space.of([3, 30, 300], range(1, 1001), [0, 4])
    found = space.nearest(block_size=100, fetch_factor=7, num_workers=3)
    assert found == Configuration(block_size=300, fetch_factor=7, num_workers=4)


def test_other_settings_are_part_of_it():
    space = Space.of([4], range(1, 4097), [0, 2], align=["chunks", None], num_threads=[4, 1, 2])
    assert space.size == 4096 * 2 * 2 * 3
    assert space.others == {"align": ("chunks", None), "num_threads": (1, 2, 4)}
    assert {each["align"] for each in space.coarse_grid()} == {"chunks", None}
    assert {each["num_threads"] for each in space.coarse_grid()} == {1, 2, 4}
    found = space.nearest(block_size=9, fetch_factor=77, num_workers=2, align=None, num_threads=3)
    assert found in space
    assert (found.fetch_factor, found["align"]) == (80, None)
    assert Configuration(block_size=4, fetch_factor=1) not in space


@pytest.mark.parametrize("sizes", [([], [1], [0]), (range(1, 1), [1], [0]), ([1], [1], [])])
def test_no_sizes_are_refused(sizes):
    with pytest.raises(ParameterError, match="at least one value"):
        Space.of(*sizes)


@pytest.mark.parametrize("sizes", [(range(9), [1], [0]), ([1], [0, 1], [0]), ([1], [1], [-1, 0])])
def test_sizes_below_the_least_are_refused(sizes):
    with pytest.raises(ParameterError, match="must hold"):
        Space.of(*sizes)


def test_a_loaders_own_setting_may_have_any_name():
    space = Space.of((4,), (2,), (0,), workers=(1, 2), block_sizes=("a",))
    assert space.others == {"workers": (1, 2), "block_sizes": ("a",)}
    assert [each["workers"] for each in space.grid()] == [1, 2]
