"""Replayed label entropy, against the dataset itself and against theory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.tuner.entropies import plug_in

from cellfeed import BlockShuffling, CellDataset, EpochPlan, ParameterError, Streaming
from cellfeed_tuner import label_entropy, minibatch_entropies, strategy_entropy, theory
from cellfeed_tuner._entropy import entropies_of


@given(hnp.arrays(np.int16, hnp.array_shapes(min_dims=2, max_dims=2), elements=st.integers(-1, 4)))
def test_entropies_are_the_plug_in_estimate_of_known_labels(minibatches):
    expected = [plug_in(minibatch) for minibatch in minibatches.tolist()]
    assert entropies_of(minibatches) == pytest.approx(expected, abs=1e-12)


@given(
    n_rows=st.integers(8, 300),
    block_size=st.integers(1, 40),
    fetch_factor=st.integers(1, 6),
    seed=st.integers(0, 5),
)
def test_replay_gives_the_minibatches_that_the_dataset_delivers(
    n_rows, block_size, fetch_factor, seed
):
    labels = np.arange(n_rows) * 5 // n_rows
    dataset = CellDataset(
        labels, BlockShuffling(block_size), batch_size=8, fetch_factor=fetch_factor, seed=seed
    )
    delivered = [plug_in(batch.tolist()) for batch in dataset if len(batch) == 8]
    assert minibatch_entropies(labels, dataset.plan(epoch=0)) == pytest.approx(delivered)


def test_replay_agrees_with_theory_where_blocks_hold_one_label():
    labels = np.repeat(np.random.default_rng(0).integers(0, 14, 4000), 64)
    p = np.bincount(labels)
    for cell in label_entropy(
        labels, batch_size=64, block_sizes=[16, 64], fetch_factors=[1, 4, 16]
    ):
        expected = theory.expected_entropy_bits(p, 64, cell.block_size, cell.fetch_factor)
        margin = 2 * (cell.bits.high - cell.bits.low)
        assert cell.bits.value == pytest.approx(expected, abs=margin), cell


@pytest.mark.parametrize(
    ("n_rows", "batch_size", "block_size", "fetch_factor"),
    [
        (300_000, 64, 1000, 16),
        (300_000, 64, 1100, 16),
        (400_000, 64, 4096, 65),
        (40_000, 64, 96, 4),
    ],
)
def test_where_fetches_and_blocks_differ_in_size(n_rows, batch_size, block_size, fetch_factor):
    """At the start of an epoch, fetches cross fewer boundaries of blocks than later."""
    labels = np.arange(n_rows) // -(-n_rows // 10)
    (found,) = label_entropy(
        labels, batch_size=batch_size, block_sizes=[block_size], fetch_factors=[fetch_factor],
        n_rows=n_rows // 2,
    )  # fmt: skip
    plan = EpochPlan(
        strategy=BlockShuffling(block_size),
        n_rows=n_rows,
        batch_size=batch_size,
        fetch_factor=fetch_factor,
    )
    epochs = [replace(plan, epoch=epoch) for epoch in range(100, 104)]
    whole = np.mean([minibatch_entropies(labels, each).mean() for each in epochs])
    assert found.bits.value == pytest.approx(whole, abs=found.bits.high - found.bits.low)


def test_of_a_fixed_order_is_that_of_all_of_it():
    """Not of the cells at its two ends, which have one label each."""
    labels = np.random.default_rng(0).integers(2, 10, 100_000)
    labels[:10_000], labels[-10_000:] = 0, 1
    plan = EpochPlan(strategy=Streaming(), n_rows=labels.size, batch_size=64, fetch_factor=16)
    found, whole = strategy_entropy(labels, plan, n_rows=50_000), minibatch_entropies(labels, plan)
    assert found.bits.value == pytest.approx(whole.mean(), abs=0.2)
    assert found.drawn_bits == pytest.approx(theory.entropy_bits(np.bincount(labels)), abs=0.1)


@pytest.mark.parametrize(("block_size", "n_rows"), [(64, 64_000), (64, 64_032), (1_024, 64_000)])
def test_the_interval_holds_the_mean_over_all_epochs(block_size, n_rows):
    """Also where one block fills many fetches, or a short one moves the boundaries."""
    labels = np.sort(np.random.default_rng(0).integers(0, 14, n_rows))
    estimates = [
        label_entropy(
            labels, batch_size=64, block_sizes=[block_size], fetch_factors=[1], n_rows=30_000,
            seed=seed,
        )[0].bits
        for seed in range(100)
    ]  # fmt: skip
    mean = np.mean([each.value for each in estimates])
    assert np.mean([each.low <= mean <= each.high for each in estimates]) > 0.85


def test_missing_labels_do_not_count():
    labels = np.tile([0, 1, -1, -1], 500)
    (cell,) = label_entropy(labels, batch_size=64, block_sizes=[4], fetch_factors=[4])
    (known,) = label_entropy(
        np.tile([0, 1], 500), batch_size=32, block_sizes=[2], fetch_factors=[4]
    )
    assert cell.bits.value == pytest.approx(known.bits.value, abs=0.02)


@pytest.mark.parametrize("missing_share", [0.3, 0.9])
def test_single_rows_mix_as_random_sampling_does_whatever_is_missing(missing_share):
    rng = np.random.default_rng(0)
    labels = np.where(rng.random(20_000) < missing_share, -1, rng.integers(0, 5, 20_000))
    n_missing = int((labels < 0).sum())
    random = theory.random_entropy_bits(np.bincount(labels[labels >= 0]), 64, n_missing=n_missing)
    (cell,) = label_entropy(labels, batch_size=64, block_sizes=[1], fetch_factors=[4])
    assert cell.bits.value == pytest.approx(random, abs=0.01)


def test_a_handful_of_cells_is_not_replayed_for_ever():
    (cell,) = label_entropy([0, 1, 0, 1, 0], batch_size=2, block_sizes=[1], fetch_factors=[1])
    assert cell.n_minibatches == 2 * 256


def test_a_collection_smaller_than_a_minibatch_has_one_minibatch():
    (cell,) = label_entropy([0, 0, 1], batch_size=64, block_sizes=[8], fetch_factors=[4], n_rows=1)
    assert cell.bits.value == pytest.approx(plug_in([0, 0, 1]))


def test_the_grid_comes_with_block_sizes_outermost():
    cells = label_entropy(
        np.zeros(100, dtype=np.int8),
        batch_size=4,
        block_sizes=[1, 2],
        fetch_factors=[1, 2],
        n_rows=100,
    )
    assert [(c.block_size, c.fetch_factor) for c in cells] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(c.bits.value == 0 for c in cells)


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.5, 1.5], ["a", "b"]])
def test_labels_that_are_no_codes_are_refused(labels):
    with pytest.raises(ParameterError, match="integer codes"):
        label_entropy(labels, batch_size=2, block_sizes=[1], fetch_factors=[1])
