"""Measurements in turns, held against worlds in which the truth is known."""

import numpy as np
import pytest

from cellfeed_tuner import Configuration, Estimate, Rival
from cellfeed_tuner._searching._posterior import TurnsOf

A, B, C = (Configuration(block_size=size, fetch_factor=16) for size in (1, 4, 16))
SPEEDS = {A: 1000.0, B: 1100.0, C: 1600.0}


def turns_of(n, *, noise=0.02, moment=0.3, left=None, seed=0):
    """Return turns in which what the moment does is far larger than what is to be found."""
    rng = np.random.default_rng(seed)
    turns = TurnsOf[Configuration]()
    for number in range(n):
        common = np.exp(moment * rng.standard_normal())
        there = [each for each in SPEEDS if each != left or number < n // 3]
        turns.add(
            {each: SPEEDS[each] * common * np.exp(noise * rng.standard_normal()) for each in there}
        )
    return turns


def test_what_the_moment_does_to_all_alike_changes_no_ratio():
    ratio = turns_of(4, noise=0.0).ratio(B, A)
    assert ratio is not None
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([1.1] * 3)


def test_intervals_of_ratios_hold_as_often_as_they_say():
    found = [turns_of(6, seed=seed, left=C).ratio(B, A) for seed in range(400)]
    held = np.mean([each is not None and each.low <= 1.1 <= each.high for each in found])
    assert 0.92 <= held <= 0.98


def test_the_ratio_one_way_is_the_inverse_of_the_other():
    turns = turns_of(5)
    there, back = turns.ratio(A, C), turns.ratio(C, A)
    assert there is not None
    assert back is not None
    assert there.value == pytest.approx(1 / back.value)
    assert (there.low, there.high) == (pytest.approx(1 / back.high), pytest.approx(1 / back.low))


def test_finalists_are_what_was_in_most_turns_the_fastest_first():
    assert turns_of(9).finalists() == [C, B, A]
    assert turns_of(9, left=C).finalists() == [B, A]
    assert TurnsOf[Configuration]().finalists() == []


def test_one_turn_says_nothing_of_a_ratio():
    assert turns_of(1).ratio(A, B) is None


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
def test_a_rival_is_undecided_where_the_interval_leaves_open_which_is_faster(ratio, undecided):
    assert Rival(configuration=A, ratio=ratio, n_turns=4).is_undecided == undecided


def test_what_is_forgotten_was_in_no_turn():
    turns = turns_of(4)
    turns.forget(C)
    assert turns.finalists() == [B, A]
    assert turns.count(C) == 0
    assert len(turns) == 4
