"""What the cost model says between and beyond its samples."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cellfeed_tuner import Configuration
from cellfeed_tuner._searching._cost_model import (
    CostModel,
    Geometry,
    Observations,
    distinct,
    draws_of,
)

BATCH_SIZE = 64
GRID = [
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b, f, w in product((1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256), (0, 1, 2, 4))
]


def seconds_per_cell(configuration, *, fetch=0.01, block=2e-4, cell=1e-5):
    cells = BATCH_SIZE * configuration.fetch_factor
    blocks = max(1, cells / configuration.block_size)
    return (fetch + block * blocks + cell * cells) / cells / max(1, configuration.num_workers)


def drawn(model, seen, n_draws):
    mean, covariance = model.posterior(seen)
    return draws_of(mean, covariance, n_draws, np.random.default_rng(0))


def observed(seconds, error):
    """Observations of so many seconds per cell, with the same relative error."""
    logs = np.log(np.array(list(seconds.values())))
    return Observations(list(seconds), logs, error**2 * np.eye(len(seconds)))


def fitted(configurations, n_draws=200):
    model = CostModel(GRID, BATCH_SIZE, Geometry())
    seen = observed({each: seconds_per_cell(each) for each in configurations}, 0.01)
    return drawn(model, seen, n_draws)


def test_different_pieces_are_counted_as_chance_has_it():
    rng = np.random.default_rng(0)
    drawn = [np.unique(rng.integers(0, 14, 20)).size for _ in range(20_000)]
    assert distinct(14, np.array([20.0])) == pytest.approx(np.mean(drawn), rel=0.005)


@given(st.floats(1, 1e6), st.floats(1, 1e7), st.floats(1, 100))
def test_no_more_pieces_are_touched_than_there_are(pieces, blocks, touched):
    (found,) = distinct(pieces, np.array([blocks]), touched)
    assert 0 < found <= min(pieces, blocks * touched) * (1 + 1e-6)


def test_a_sum_of_costs_is_known_from_a_few_samples():
    probes = [GRID[place] for place in np.random.default_rng(1).choice(len(GRID), 16, False)]
    found = np.median(fitted(probes), axis=0)
    wrong = found - np.log([seconds_per_cell(each) for each in GRID])
    assert np.quantile(np.abs(wrong), 0.9) < 0.25


def test_samples_override_the_sum():
    odd = GRID[70]
    seen = {odd: 3 * seconds_per_cell(odd)}
    seen |= {each: seconds_per_cell(each) for each in GRID[::9] if each != odd}
    model = CostModel(GRID, BATCH_SIZE, Geometry())
    found = np.exp(np.median(drawn(model, observed(seen, 0.01), 200), axis=0))
    assert found[70] == pytest.approx(3 * seconds_per_cell(odd), rel=0.1)


def test_a_slow_small_fetch_of_a_worker_says_nothing_of_what_workers_add_to_each_cell():
    """It is slow since it is small: 200 times as slow by cell as the large fetch."""
    large = Configuration(block_size=64, fetch_factor=256)
    with_workers = large.changed(num_workers=4)
    seen = {
        Configuration(block_size=1, fetch_factor=1): 0.03,
        Configuration(block_size=1, fetch_factor=1, num_workers=1): 0.03,
        large: 1.5e-4,
    }
    model = CostModel(GRID, BATCH_SIZE, Geometry())
    draws = np.exp(drawn(model, observed(seen, 0.05), 200))
    medians = dict(zip(GRID, np.median(draws, axis=0), strict=True))
    assert medians[with_workers] < 4 * medians[large]


def test_what_is_far_from_all_samples_is_less_certain():
    near = Configuration(block_size=16, fetch_factor=16)
    draws = fitted([near])
    spread = dict(zip(GRID, draws.std(axis=0), strict=True))
    assert spread[near] < 0.05
    assert spread[Configuration(block_size=16, fetch_factor=64)] > spread[near]
    far = Configuration(block_size=1, fetch_factor=1, num_workers=4)
    assert spread[far] > 1.5 * spread[Configuration(block_size=16, fetch_factor=64)]


def test_without_samples_large_blocks_and_fetches_are_thought_to_be_fast():
    median = dict(zip(GRID, np.median(fitted([]), axis=0), strict=True))
    small = Configuration(block_size=1, fetch_factor=1)
    assert median[small] > median[Configuration(block_size=256, fetch_factor=256)]


@settings(max_examples=25, deadline=None)
@given(
    samples=st.dictionaries(st.integers(0, len(GRID) - 1), st.floats(1e-7, 10), max_size=12),
    geometry=st.sampled_from(
        [Geometry(), Geometry(n_cells=10**6, rows_per_chunk=12.5, n_files=14),
         Geometry(n_cells=100, rows_per_chunk=0.2, n_files=1)]
    ),
)  # fmt: skip
@example(
    samples={1: 0.125, 10: 1.0, 2: 1.0, 3: 1.0},
    geometry=Geometry(n_cells=10**6, rows_per_chunk=12.5, n_files=14),
)
def test_any_samples_and_any_storage_give_finite_costs(samples, geometry):
    model = CostModel(GRID, BATCH_SIZE, geometry)
    seen = observed({GRID[place]: seconds for place, seconds in samples.items()}, 0.05)
    assert np.isfinite(drawn(model, seen, 8)).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_grid_of_one_number_of_workers_is_a_grid_too(workers):
    some = [each for each in GRID if each.num_workers == workers]
    model = CostModel(some, BATCH_SIZE, Geometry())
    seen = observed({each: seconds_per_cell(each) for each in some[::4]}, 0.01)
    found = np.median(drawn(model, seen, 100), axis=0)
    wrong = found - np.log([seconds_per_cell(each) for each in some])
    assert np.abs(wrong).mean() < 0.3


def test_ranks_divide_an_epoch():
    """A fourth of the cells has as few fetches, of which the first is not read ahead."""
    part, divided, whole = (
        CostModel(GRID, BATCH_SIZE, Geometry(n_cells=n_cells, n_ranks=n_ranks)).mean()
        for n_cells, n_ranks in ((10**5, 1), (4 * 10**5, 4), (4 * 10**5, 1))
    )
    assert np.array_equal(part, divided)
    assert np.all(whole <= divided)
    assert np.any(whole < divided)
