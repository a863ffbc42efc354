"""Conditional label entropy, against the definition and against enumeration."""

from collections import Counter
from itertools import combinations
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import BlockShuffling, EpochPlan, ParameterError
from cellfeed_tuner import Conditional, label_entropy
from cellfeed_tuner._entropy import (
    _joint,
    as_codes,
    count_labels,
    label_pair,
    random_conditional_entropy_bits,
    replay_plan,
    statistic_of,
)

pairs = st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 2)), min_size=1, max_size=8)


def joint_codes(first, second):
    pair = label_pair(first, second)
    return _joint(*pair, int(pair[1].max()) + 1)


def conditional(drawn) -> float:
    """Mean entropy of the first label within each value of the second, by definition."""
    known = [(a, b) for a, b in drawn if a >= 0 and b >= 0]
    total = 0.0
    for value, n in Counter(b for _, b in known).items():
        within = Counter(a for a, b in known if b == value)
        total -= sum(c * log2(c / n) for c in within.values())
    return total / len(known) if known else 0.0


@given(pairs)
def test_joint_codes_number_pairs_and_keep_missing_ones(rows):
    first, second = np.array(rows).T
    joint = joint_codes(first, second).tolist()
    assert [code < 0 for code in joint] == [min(row) < 0 for row in rows]
    known = [(row, code) for row, code in zip(rows, joint, strict=True) if code >= 0]
    assert len({row for row, _ in known}) == len({code for _, code in known}) == len(set(known))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint64])
def test_joint_codes_do_not_overflow(dtype):
    first = np.array([0, 100, 127], dtype)
    second = np.array([127, 0, 127], dtype)
    assert joint_codes(first, second).tolist() == [127, 12_800, 127 * 128 + 127]


@given(pairs, st.integers(1, 8))
def test_random_sampling_gives_the_enumerated_mean(rows, batch_size):
    drawn = min(batch_size, len(rows))
    exact = sum(map(conditional, combinations(rows, drawn))) / comb(len(rows), drawn)
    first, second = np.array(rows).T
    computed = random_conditional_entropy_bits(first, second, batch_size)
    assert computed == pytest.approx(exact, abs=1e-9)
    if second.min() >= 0:
        unsigned = second.astype(np.uint8)
        assert random_conditional_entropy_bits(first, unsigned, batch_size) == computed


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 2)), min_size=4, max_size=60))
def test_the_replay_gives_the_mean_over_the_minibatches_of_the_plan(rows):
    first, second = np.array(rows).T
    (cell,) = label_entropy(
        Conditional(first, second), batch_size=4, block_sizes=[2], fetch_factors=[2], n_rows=1
    )
    found: list[float] = []
    for epoch in range(40):
        plan = EpochPlan(
            strategy=BlockShuffling(block_size=2),
            n_rows=len(rows), batch_size=4, fetch_factor=2, epoch=epoch,
        )  # fmt: skip
        order = np.concatenate([plan.delivered_rows(i)[0] for i in range(plan.n_fetches)])
        full = order[: order.size - order.size % 4].reshape(-1, 4)
        found += [conditional([rows[row] for row in batch]) for batch in full]
    assert 16 <= cell.n_minibatches < len(found)
    assert cell.bits.value == pytest.approx(np.mean(found[: cell.n_minibatches]), abs=1e-9)


def test_codes_may_be_unsigned_where_the_others_are_missing():
    rng = np.random.default_rng(0)
    plate, line = rng.integers(-1, 3, 2_000), rng.integers(0, 3, 2_000)
    (signed,), (unsigned,) = (
        label_entropy(
            Conditional(plate, line.astype(dtype)),
            batch_size=64, block_sizes=[1], fetch_factors=[1],
        )
        for dtype in (np.int64, np.uint8)
    )  # fmt: skip
    assert unsigned.bits.value == signed.bits.value
    counts = count_labels(as_codes(line.astype(np.uint8))).counts
    assert counts.tolist() == np.bincount(line).tolist()
    with pytest.raises(ParameterError, match=r"must be less than 2\*\*63, but one is 1844"):
        as_codes(np.array([2**64 - 1], np.uint64))


def test_single_rows_mix_as_random_sampling_does():
    rng = np.random.default_rng(0)
    plate, line = np.sort(rng.integers(0, 5, 20_000)), rng.integers(-1, 3, 20_000)
    (cell,) = label_entropy(
        Conditional(plate, line), batch_size=64, block_sizes=[1], fetch_factors=[1]
    )
    random = random_conditional_entropy_bits(plate, line, 64)
    assert cell.bits.low - 0.002 < random < cell.bits.high + 0.002


def test_several_labels_are_replayed_as_each_is_alone():
    rng = np.random.default_rng(0)
    labels = [np.repeat([0, 1, 2], 500), rng.integers(-1, 9, 1500)]
    statistics = [statistic_of(codes)[0] for codes in labels]
    plan = EpochPlan(strategy=BlockShuffling(32), n_rows=1500, batch_size=16, fetch_factor=4)
    together = replay_plan(plan, statistics, n_rows=4000)
    for statistic, found in zip(statistics, together, strict=True):
        (alone,) = replay_plan(plan, [statistic], n_rows=4000)
        assert alone.mean == found.mean


def test_pairs_that_do_not_fit_together_are_refused():
    with pytest.raises(ParameterError, match="as many rows"):
        joint_codes([0, 1], [0])
    with pytest.raises(ParameterError, match="63"):
        joint_codes([2**40], [2**40])
