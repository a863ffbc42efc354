"""Files that are shuffled already, and files that are not."""

import numpy as np
import pytest

from cellfeed_tuner import _entropy, label_entropy
from cellfeed_tuner._entropy import count_labels


def storage_order(codes, *, batch_size, block_size, n_rows=1_000_000, seed=0):
    """The storage order of labels, by what is replayed of them alone."""
    in_blocks, single_rows = label_entropy(
        codes, batch_size=batch_size, block_sizes=[block_size, 1], fetch_factors=[1],
        n_rows=n_rows, seed=seed,
    )  # fmt: skip
    return _entropy.storage_order(
        in_blocks,
        single_rows,
        random_bits=count_labels(codes).random_entropy_bits(batch_size),
        n_distinct=codes.size // batch_size,
    )


@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("n_labels", [2, 14, 400])
@pytest.mark.parametrize(("n_rows", "block_size"), [(1_000, 300), (20_000, 1_024), (20_000, 7)])
def test_shuffled_rows_are_recognised_whatever_their_order(missing, n_labels, n_rows, block_size):
    rng = np.random.default_rng(0)
    for seed in range(5):
        codes = rng.integers(0, n_labels, n_rows)
        codes[rng.random(n_rows) < missing] = -1
        found = storage_order(codes, batch_size=64, block_size=block_size, n_rows=50_000, seed=seed)
        assert found.already_shuffled, found
        assert "already shuffled, so large blocks cost nothing" in found.sentence


def test_the_tolerance_is_four_deviations_of_what_shuffled_rows_give():
    rng = np.random.default_rng(0)
    found = [
        storage_order(rng.integers(0, 14, 3_000), batch_size=64, block_size=64, n_rows=50_000)
        for _ in range(60)
    ]
    below = np.array([each.random_bits - each.expected_bits for each in found])
    tolerance = np.mean([each.tolerance_bits for each in found])
    assert tolerance == pytest.approx(3.89 * below.std(ddof=1), rel=0.35)


@pytest.mark.parametrize("window", [1, 64, 256])
def test_rows_that_are_shuffled_only_nearby_are_not_shuffled(window):
    rng = np.random.default_rng(0)
    codes = np.repeat(rng.integers(0, 14, 20_480 // window), window)
    codes = np.sort(codes) if window == 1 else codes
    found = storage_order(codes, batch_size=64, block_size=256)
    assert not found.already_shuffled
    assert "not shuffled" in found.sentence


def test_labels_that_take_turns_cost_nothing_either():
    codes = np.tile(np.arange(4), 1_000)
    assert storage_order(codes, batch_size=64, block_size=512).already_shuffled


def test_a_slightly_incomplete_shuffle_is_seen():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 14, 100_000)
    codes[:10_000] = 0  # a tenth is of one label, and lies together
    assert not storage_order(codes, batch_size=64, block_size=1_024).already_shuffled
