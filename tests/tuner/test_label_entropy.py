"""Label entropy of minibatches that nobody reads, against counting, the dataset and theory."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.tuner.test_theory import plug_in

from cellfeed import BlockShuffling, CellDataset, EpochPlan, ParameterError, Streaming
from cellfeed_tuner import (
    label_entropy,
    minibatch_entropies,
    strategy_entropy,
    theory,
)
from cellfeed_tuner._entropy import (
    as_codes,
    count_labels,
)


def entropy_of(labels, *, batch_size=64, block_size=1, fetch_factor=4, **options):
    """Label entropy of one configuration."""
    (found,) = label_entropy(
        labels, batch_size=batch_size, block_sizes=[block_size], fetch_factors=[fetch_factor],
        **options,
    )  # fmt: skip
    return found


@given(
    hnp.arrays(
        st.sampled_from([np.int8, np.int16, np.int64]),
        st.integers(0, 50),
        elements=st.integers(-3, 20),
    ),
    st.sampled_from([0, 10**12]),
)
def test_each_label_is_counted(codes, offset):
    codes = np.where(codes < 0, codes, codes.astype(np.int64) + offset)
    expected = Counter(codes.tolist())
    found = count_labels(codes)
    assert found.counts.tolist() == [expected[code] for code in sorted(expected) if code >= 0]
    assert found.n_missing == sum(n for code, n in expected.items() if code < 0)
    assert found.n_rows == codes.size


@pytest.mark.parametrize("n_rows", [(1 << 20) - 1, (1 << 20) + 1])
def test_it_counts_across_the_ends_of_its_parts(n_rows):
    codes = np.arange(n_rows) % 7 - 1
    found = count_labels(codes)
    assert found.n_missing == (codes == -1).sum()
    assert np.array_equal(found.counts, np.bincount(codes[codes >= 0]))


@given(
    labels=hnp.arrays(np.int16, st.integers(8, 300), elements=st.integers(-1, 4)),
    block_size=st.integers(1, 40),
    fetch_factor=st.integers(1, 6),
    seed=st.integers(0, 5),
)
def test_replay_gives_the_minibatches_that_the_dataset_delivers(
    labels, block_size, fetch_factor, seed
):
    dataset = CellDataset(
        labels, BlockShuffling(block_size), batch_size=8, fetch_factor=fetch_factor, seed=seed
    )
    delivered = [plug_in(batch.tolist()) for batch in dataset if len(batch) == 8]
    found = minibatch_entropies(labels, dataset.plan(epoch=0))
    assert found == pytest.approx(delivered, abs=1e-12)


@pytest.mark.slow
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
    sizes = {"batch_size": batch_size, "fetch_factor": fetch_factor}
    found = entropy_of(labels, block_size=block_size, n_rows=n_rows // 2, **sizes)
    plan = EpochPlan(strategy=BlockShuffling(block_size), n_rows=n_rows, **sizes)
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


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "n_rows"), [(64, 64_000), (64, 64_032), (1_024, 64_000)])
def test_the_interval_holds_the_mean_over_all_epochs(block_size, n_rows):
    """Also where one block fills many fetches, or a short one moves the boundaries."""
    labels = np.sort(np.random.default_rng(0).integers(0, 14, n_rows))
    estimates = [
        entropy_of(labels, block_size=block_size, fetch_factor=1, n_rows=30_000, seed=seed).bits
        for seed in range(50)
    ]
    mean = np.mean([each.value for each in estimates])
    assert np.mean([each.low <= mean <= each.high for each in estimates]) > 0.85


@pytest.mark.parametrize("missing_share", [0.3, 0.9])
def test_single_rows_mix_as_random_sampling_does_whatever_is_missing(missing_share):
    rng = np.random.default_rng(0)
    labels = np.where(rng.random(20_000) < missing_share, -1, rng.integers(0, 5, 20_000))
    n_missing = int((labels < 0).sum())
    random = theory.random_entropy_bits(np.bincount(labels[labels >= 0]), 64, n_missing=n_missing)
    assert entropy_of(labels).bits.value == pytest.approx(random, abs=0.01)


def test_very_few_cells():
    found = entropy_of([0, 1, 0, 1, 0], batch_size=2, fetch_factor=1)
    assert found.n_minibatches == 2 * 256  # not for ever
    found = entropy_of([0, 0, 1], block_size=8, n_rows=1)  # fewer than a minibatch
    assert found.bits.value == pytest.approx(plug_in([0, 0, 1]))


def test_the_grid_comes_with_block_sizes_outermost():
    cells = label_entropy(
        np.zeros(100, dtype=np.int8), batch_size=4, block_sizes=[1, 2], fetch_factors=[1, 2],
        n_rows=100,
    )  # fmt: skip
    assert [(c.block_size, c.fetch_factor) for c in cells] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(c.bits.value == 0 for c in cells)


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        *((labels, "integer codes") for labels in ([], [[0, 1]], [0.5, 1.5], ["a", "b"])),
        (np.array([2**64 - 1], np.uint64), r"must be less than 2\*\*63, but one is 1844"),
    ],
)
def test_labels_that_are_no_codes_are_refused(labels, why):
    with pytest.raises(ParameterError, match=why):
        entropy_of(labels, batch_size=2)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint64])
def test_codes_may_be_of_any_integers(dtype):
    labels = np.random.default_rng(0).integers(0, 128, 300)
    _, counts = np.unique(labels, return_counts=True)
    assert np.array_equal(count_labels(as_codes(labels.astype(dtype))).counts, counts)
    assert entropy_of(labels.astype(dtype)).bits == entropy_of(labels).bits


@given(st.lists(st.integers(-1, 3), min_size=4, max_size=60))
def test_the_replay_gives_the_mean_over_the_minibatches_of_the_plan(labels):
    cell = entropy_of(labels, batch_size=4, block_size=2, fetch_factor=2, n_rows=1)
    found: list[float] = []
    for epoch in range(40):
        plan = EpochPlan(
            strategy=BlockShuffling(block_size=2),
            n_rows=len(labels), batch_size=4, fetch_factor=2, epoch=epoch,
        )  # fmt: skip
        order = np.concatenate([plan.delivered_rows(i)[0] for i in range(plan.n_fetches)])
        full = order[: order.size - order.size % 4].reshape(-1, 4)
        found += [plug_in([labels[row] for row in batch if labels[row] >= 0]) for batch in full]
    assert 16 <= cell.n_minibatches < len(found)
    assert cell.bits.value == pytest.approx(np.mean(found[: cell.n_minibatches]), abs=1e-9)
