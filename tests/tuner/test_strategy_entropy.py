"""Entropy of any strategy, against what it draws, and where theory applies."""

from itertools import product
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    EpochPlan,
    GroupedSampling,
    ParameterError,
    SamplingStrategy,
    Streaming,
)
from cellfeed_tuner import label_entropy, minibatch_entropies, strategy_entropy, theory

LABELS = np.repeat([0, 1, 2], [40_000, 4_000, 400])


def plan_of(strategy: SamplingStrategy, fetch_factor: int = 64, batch_size: int = 64) -> EpochPlan:
    return EpochPlan(
        strategy=strategy, n_rows=LABELS.size, batch_size=batch_size, fetch_factor=fetch_factor
    )


@settings(max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 3))
def test_independent_entropy_is_the_enumerated_one(counts, batch_size, n_missing):
    total = sum(counts) + n_missing
    p = [each / total for each in counts] + [n_missing / total]
    expected = 0.0
    for drawn in product(range(len(p)), repeat=batch_size):
        known = [each for each in drawn if each < len(counts)]
        shares = [known.count(each) / len(known) for each in set(known)]
        chance = np.prod([p[each] for each in drawn])
        expected -= chance * sum(share * log2(share) for share in shares)
    found = theory.independent_entropy_bits(counts, batch_size, n_missing=n_missing)
    assert found == pytest.approx(expected, abs=1e-9)


def test_independent_entropy_without_labels_is_0():
    assert theory.independent_entropy_bits([], 64, n_missing=3) == 0


def test_of_block_shuffling_is_that_of_the_grid():
    found = strategy_entropy(LABELS, plan_of(BlockShuffling(16), 4))
    (of_grid,) = label_entropy(LABELS, batch_size=64, block_sizes=[16], fetch_factors=[4])
    assert found.bits == of_grid.bits
    assert found.n_minibatches == of_grid.n_minibatches


def test_class_balance_is_held_against_equal_classes():
    found = strategy_entropy(LABELS, plan_of(ClassBalancedSampling(LABELS, 16)))
    assert found.drawn_bits == pytest.approx(log2(3), abs=1e-3)
    assert found.random_bits == pytest.approx(
        theory.independent_entropy_bits([1, 1, 1], 64), abs=1e-3
    )
    assert found.share_of_random > 0.97


@pytest.mark.parametrize("fetch_factor", [1, 4, 64])
def test_of_blocks_of_one_label_is_what_theory_says(fetch_factor):
    strategy = ClassBalancedSampling(LABELS, 8)
    found = strategy_entropy(LABELS, plan_of(strategy, fetch_factor))
    assert found.bits.value == pytest.approx(found.homogeneous_bits, abs=0.01)
    assert found.bits.value < found.random_bits + 0.01


def test_of_single_cells_drawn_by_weight_is_that_of_independent_draws():
    weights = np.random.default_rng(0).gamma(1.0, size=LABELS.size) * np.array([1, 5, 50])[LABELS]
    found = strategy_entropy(LABELS, plan_of(BlockWeightedSampling(1, weights=weights)))
    drawn = np.bincount(LABELS, weights)
    assert found.drawn_bits == pytest.approx(theory.entropy_bits(drawn), abs=5e-3)
    assert found.bits.value == pytest.approx(found.random_bits, abs=0.01)


@pytest.mark.parametrize("strategy", [Streaming(), GroupedSampling(LABELS, 16)])
def test_theory_does_not_apply_to(strategy):
    found = strategy_entropy(LABELS, plan_of(strategy))
    assert found.homogeneous_bits is None
    assert found.share_of_random < 1


def test_missing_labels_are_left_out():
    labels = np.where(np.random.default_rng(0).random(LABELS.size) < 0.5, LABELS, -1)
    weights = np.array([1.0, 10.0, 100.0])[LABELS]
    found = strategy_entropy(labels, plan_of(BlockWeightedSampling(1, weights=weights)))
    assert found.bits.value == pytest.approx(found.random_bits, abs=0.01)
    nothing = strategy_entropy(np.full(LABELS.size, -1), plan_of(BlockShuffling(1)))
    assert nothing.bits.value == nothing.random_bits == nothing.drawn_bits == 0


def test_an_epoch_of_less_than_a_minibatch():
    plan = plan_of(BlockWeightedSampling(weights=np.ones(LABELS.size), total_size=10))
    assert minibatch_entropies(LABELS, plan).size == 1
    assert strategy_entropy(LABELS, plan).n_minibatches >= 16


def test_labels_of_other_rows():
    with pytest.raises(ParameterError, match="a label for each of 44,400 rows, but there are 3"):
        strategy_entropy([0, 1, 2], plan_of(BlockShuffling(1)))
