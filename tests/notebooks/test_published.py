"""The values that were published, against theory and against where they come from."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from notebooks.figures import published_grid, published_macro_f1, published_workers

from cellfeed_tuner import theory

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "published"


def plate_shares(seed) -> np.ndarray:
    """Shares of 14 plates between 4.7 % and 10.4 % with H = 3.78, at random."""
    rng = np.random.default_rng(seed)
    while True:
        middle = rng.uniform(4.7, 10.4, 12)
        shares = np.concatenate([[4.7, 10.4], middle * (100 - 15.1) / middle.sum()])
        inside = shares.min() >= 4.7 and shares.max() <= 10.4
        if inside and abs(theory.entropy_bits(shares) - 3.78) < 0.002:
            return shares / 100


@pytest.mark.parametrize("seed", range(5))
def test_exact_expectation_lies_within_006_bits_of_all_published_values(seed):
    grid = published_grid().query("strategy == 'BlockShuffling'")
    assert len(grid) == 36
    shares = plate_shares(seed)
    for block_size, fetch_factor, published in zip(
        grid["block_size"].astype(int), grid["fetch_factor"].astype(int), grid["entropy_bits"],
        strict=True,
    ):  # fmt: skip
        expected = theory.expected_entropy_bits(shares, 64, block_size, fetch_factor)
        assert expected == pytest.approx(published, abs=0.06), (block_size, fetch_factor)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the shared data are not beside this clone")
def test_the_carried_tables_are_the_published_ones():
    digits = {"cells_per_second": 2, "entropy_bits": 4, "entropy_bits_std": 4, "block_size": 0}
    for name, carried in (("grid", published_grid()), ("workers", published_workers())):
        source = pd.read_csv(PUBLISHED / f"tahoe_anndata_{name}.csv")
        pd.testing.assert_frame_equal(carried[[*digits]], source[[*digits]].round(digits))
    source = pd.read_csv(PUBLISHED / "fig5_macro_f1.csv")
    pd.testing.assert_frame_equal(
        published_macro_f1().drop(columns="strategy"), source.drop(columns="strategy")
    )


def test_all_tasks_and_strategies_were_published():
    published = published_macro_f1()
    assert not published.duplicated(["task", "strategy"]).any()
    assert published["task"].nunique() * published["strategy"].nunique() == len(published) == 16
    by_strategy = published.set_index(["task", "strategy"])["macro_f1"]
    assert by_strategy["drug", "streaming with buffer"] == 0.002065
    assert by_strategy["moa_broad", "block shuffling"] == 0.269811
