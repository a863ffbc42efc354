"""What reaches the entropy floor hangs on the expectation, and hardly on the seed."""

import numpy as np
import pytest
from tests.tuner.mixing import BlockPlans, mixing_of

from cellfeed_tuner import Constraints, label_entropy, theory

N_CELLS, BATCH_SIZE = 200_000, 64
PLATES = np.repeat(np.arange(14), -(-N_CELLS // 14))[:N_CELLS]
SIZES = [(64, 256), (16, 64), (4, 16)]  # 256 blocks in a fetch, which is near 0.99


def shares(sizes, floor):
    seeds = [mixing_of({"plate": PLATES}, floor=floor, seed=seed) for seed in range(6)]
    return [mixing[sizes]["plate"].share_of_random for mixing in seeds]


@pytest.mark.parametrize("sizes", SIZES)
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


def test_the_share_is_that_of_a_long_replay():
    block_size, fetch_factor = SIZES[0]
    (long,) = label_entropy(
        PLATES, batch_size=BATCH_SIZE, block_sizes=[block_size], fetch_factors=[fetch_factor],
        n_rows=20_000_000, seed=100,
    )  # fmt: skip
    random = theory.random_entropy_bits(np.bincount(PLATES), BATCH_SIZE)
    for share in shares(SIZES[0], 0.99):
        assert share == pytest.approx(long.bits.value / random, abs=0.0015)


@pytest.mark.parametrize(
    ("share", "mixes"), [(0.9899, True), (0.9891, True), (0.9889, False), (0.5, False), (1.0, True)]
)
def test_less_than_a_thousandth_below_the_floor_reaches_it(share, mixes):
    constraints = Constraints(entropy_floor=0.99, memory_bytes=1, need_cells_per_second=None)
    assert constraints.mixes(share) == mixes
