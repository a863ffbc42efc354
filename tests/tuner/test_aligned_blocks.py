"""Blocks that begin where chunks do: theory of unequal blocks, replay, and autotune."""

import numpy as np
import pytest

from cellfeed import BlockShuffling, CellDataset, EpochPlan, open_collection
from cellfeed.sampling import ChunkedRows, ChunkStarts
from cellfeed_tuner import autotune, label_entropy, strategy_entropy, theory

pytestmark = pytest.mark.usefixtures("short_replicates")

N_ROWS = 400_000
P = [0.5, 0.3, 0.15, 0.05]


def in_chunks(sizes: np.ndarray) -> ChunkStarts:
    """Rows of which so many begin in each chunk."""
    pointer = np.repeat(np.arange(sizes.size), sizes)
    rows = ChunkedRows(n_rows=pointer.size, chunk_size=1, pointer=np.append(pointer, sizes.size))
    return ChunkStarts(lambda: [rows])


@pytest.fixture(scope="module")
def unequal() -> tuple[BlockShuffling, np.ndarray]:
    """Blocks of 4 and of 36 rows, as often, and a label for each row: one for each block."""
    rng = np.random.default_rng(0)
    sizes = rng.permutation(np.repeat([4, 36], N_ROWS // 40))
    labels = np.repeat(rng.choice(len(P), sizes.size, p=P), sizes)
    return BlockShuffling(1, align=in_chunks(sizes)), labels


def test_sizes_are_told(unequal):
    strategy, labels = unequal
    sizes = strategy.block_sizes(labels.size)
    assert (sizes.n_blocks, sizes.mean, sizes.largest) == (N_ROWS // 20, 20, 36)
    assert sizes.effective == pytest.approx((4**2 + 36**2) / 40)


@pytest.mark.parametrize("fetch_factor", [1, 4, 64])
def test_unequal_blocks_mix_as_equal_ones_of_the_effective_size(unequal, fetch_factor):
    strategy, labels = unequal
    plan = EpochPlan(
        strategy=strategy, n_rows=labels.size, batch_size=256, fetch_factor=fetch_factor
    )
    found = strategy_entropy(labels, plan)
    counts = np.bincount(labels)
    expected = theory.expected_entropy_bits(counts, 256, 32.8, fetch_factor)
    assert found.homogeneous_bits == pytest.approx(expected, abs=2e-3)
    assert found.bits.value == pytest.approx(expected, abs=0.025 if fetch_factor == 1 else 0.01)
    # Far nearer than by the mean size of blocks, where blocks matter.
    if fetch_factor < 64:
        by_mean = theory.expected_entropy_bits(counts, 256, 20, fetch_factor)
        assert abs(found.bits.value - expected) < abs(found.bits.value - by_mean) / 3
    assert theory.lower_bound_bits(counts, 256, 32.8) < found.bits.value + 0.02


def test_between_whole_sizes_the_expectation_is_interpolated():
    low, high = (theory.expected_entropy_bits(P, 64, size, 4) for size in (16, 17))
    assert theory.expected_entropy_bits(P, 64, 16.25, 4) == pytest.approx(0.75 * low + 0.25 * high)
    assert theory.expected_entropy_bits(P, 64, 16.0, 4) == low
    assert theory.lower_bound_bits(P, 64, 16.5) == pytest.approx(
        (theory.lower_bound_bits(P, 64, 16) + theory.lower_bound_bits(P, 64, 17)) / 2
    )


def test_blocks_of_one_size_are_those_that_are_not_aligned():
    labels = np.repeat(np.arange(4), 16_000)
    strategy = BlockShuffling(16, align=in_chunks(np.full(4_000, 16)))
    plan = EpochPlan(strategy=strategy, n_rows=64_000, batch_size=64, fetch_factor=4)
    (equal,) = label_entropy(labels, batch_size=64, block_sizes=[16], fetch_factors=[4])
    found = strategy_entropy(labels, plan)
    assert found.homogeneous_bits == theory.expected_entropy_bits([1] * 4, 64, 16, 4)
    assert found.bits.value == pytest.approx(equal.bits.value, abs=0.02)


def test_a_block_of_many_fetches_is_one_observation():
    strategy = BlockShuffling(1, align=in_chunks(np.full(20, 400)))
    labels = np.repeat(np.arange(20) % 2, 400)
    plan = EpochPlan(strategy=strategy, n_rows=8_000, batch_size=20, fetch_factor=1)
    assert strategy_entropy(labels, plan).bits.value == 0


def test_autotune_takes_it(small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    given = BlockShuffling(16, align="chunks")
    result = autotune(
        collection,
        label="plate",
        strategy=given,
        block_sizes=[4, 16],
        fetch_factors=[2, 4],
        workers=[0],
        budget=600.0,
        entropy_floor=0.1,
    )
    assert result.loader_fault is None
    assert result.strategy is not None
    assert result.chosen is not None
    assert result.strategy.in_python(16) == "BlockShuffling(align='chunks', block_size=16)"
    sizes = given.bound_to(collection).block_sizes(len(collection))
    bounds = result.chosen.entropy_bits
    found = theory.lower_bound_bits(list(result.dataset.label_counts), 64, sizes.effective)
    if result.chosen.configuration.block_size == 16:
        assert bounds.lower_bound == pytest.approx(found)
    dataset = CellDataset.from_autotune(collection, result, seed=0)
    assert isinstance(dataset.strategy, BlockShuffling)
    assert isinstance(dataset.strategy.align, ChunkStarts)
    seen = np.concatenate([each.rows for each in dataset])
    assert np.array_equal(np.sort(seen), np.arange(len(collection)))
