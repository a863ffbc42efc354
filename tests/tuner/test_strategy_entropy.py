"""Entropy of any strategy, against what it draws; and what reaches the entropy floor."""

from math import log2

import numpy as np
import pytest
from tests.tuner.mixing import BlockPlans, mixing_of

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
from cellfeed_tuner import (
    Constraints,
    label_entropy,
    minibatch_entropies,
    strategy_entropy,
    theory,
)

LABELS = np.repeat([0, 1, 2], [40_000, 4_000, 400])


def plan_of(strategy: SamplingStrategy, fetch_factor: int = 64, batch_size: int = 64) -> EpochPlan:
    return EpochPlan(
        strategy=strategy, n_rows=LABELS.size, batch_size=batch_size, fetch_factor=fetch_factor
    )


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


@pytest.mark.slow
def test_of_single_cells_drawn_by_weight_is_that_of_independent_draws():
    weights = np.random.default_rng(0).gamma(1.0, size=LABELS.size) * np.array([1, 5, 50])[LABELS]
    found = strategy_entropy(LABELS, plan_of(BlockWeightedSampling(1, weights=weights)))
    drawn = np.bincount(LABELS, weights)
    assert found.drawn_bits == pytest.approx(theory.entropy_bits(drawn), abs=5e-3)
    assert found.bits.value == pytest.approx(found.random_bits, abs=0.01)


@pytest.mark.parametrize(
    "strategy", [Streaming(), pytest.param(GroupedSampling(LABELS, 16), marks=pytest.mark.slow)]
)
def test_theory_does_not_apply_to(strategy):
    found = strategy_entropy(LABELS, plan_of(strategy))
    assert found.homogeneous_bits is None
    assert found.share_of_random < 1


@pytest.mark.slow
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


PLATES = np.repeat(np.arange(14), 14_286)
SIZES = [(64, 256), (16, 64), (4, 16)]  # 256 blocks in a fetch, which is near 0.99


def shares(sizes, floor):
    seeds = [mixing_of({"plate": PLATES}, floor=floor, seed=seed) for seed in range(6)]
    return [mixing[sizes]["plate"].share_of_random for mixing in seeds]


@pytest.mark.parametrize("sizes", [pytest.param(SIZES[0], marks=pytest.mark.slow), *SIZES[1:]])
def test_a_configuration_at_the_floor_reaches_it_for_every_seed(sizes):
    constraints = Constraints(entropy_floor=0.99, memory_bytes=1, need_cells_per_second=None)
    mixed = {constraints.mixes(share) for share in shares(sizes, 0.99)}
    assert mixed == {True}


def test_what_is_near_the_floor_is_replayed_for_longer(monkeypatch):
    n_replayed, replay = list[int](), BlockPlans.replay

    def counted(*arguments, **options):
        found = replay(*arguments, **options)
        n_replayed.append(found[0].n_minibatches)
        return found

    monkeypatch.setattr(BlockPlans, "replay", counted)
    n_of = {}
    for floor in (0.99, 0.5):
        n_replayed.clear()
        mixing_of({"plate": PLATES}, floor=floor)[(64, 256)]
        n_of[floor] = max(n_replayed)
    assert n_of[0.99] > 2 * n_of[0.5]


@pytest.mark.slow
def test_the_share_is_that_of_a_long_replay():
    block_size, fetch_factor = SIZES[0]
    (long,) = label_entropy(
        PLATES, batch_size=64, block_sizes=[block_size], fetch_factors=[fetch_factor],
        n_rows=20_000_000, seed=100,
    )  # fmt: skip
    random = theory.random_entropy_bits(np.bincount(PLATES), 64)
    for share in shares(SIZES[0], 0.99):
        assert share == pytest.approx(long.bits.value / random, abs=0.0015)


@pytest.mark.parametrize(
    ("share", "mixes"), [(0.9899, True), (0.9891, True), (0.9889, False), (0.5, False), (1.0, True)]
)
def test_less_than_a_thousandth_below_the_floor_reaches_it(share, mixes):
    constraints = Constraints(entropy_floor=0.99, memory_bytes=1, need_cells_per_second=None)
    assert constraints.mixes(share) == mixes
