"""The search of a space too large to list, on a model of a disk."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import pytest
from tests.tuner.simulated import (
    BATCH_SIZE,
    Outcome,
    Space,
    TimingRequest,
    entropy_of,
    n_uncounted,
    search_on,
    tahoe_like,
    timed,
)

from cellfeed_tuner import Configuration, EntropyBits

N_CELLS, ROW_BYTES, MEMORY = 10_000_000, 10_000.0, 4 * 10**9
BITS = 3.6
RANGES = Space.of(range(1, 4097), range(1, 513), range(9))
DEFAULT = Space.of((1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256), (0, 1, 2, 4, 8))


def cells_per_second(block, fetch, workers):
    """Seeks and chunks, fetches that outgrow a cache, and workers that hinder each other."""
    cells = BATCH_SIZE * fetch
    chunks = np.maximum(1, cells / block) * (1 + (block - 1) / 100)
    outgrown = 1 + 0.05 * (cells / 6000) ** 1.5
    together = np.where(workers > 0, (1 + 0.6 * workers) / (1 + 0.06 * workers**2), 1.0)
    transfer = np.where(workers > 0, 4e-6 * cells, 0.0)
    return cells / ((2e-4 * chunks + 1e-5 * cells * outgrown + 0.002) / together + transfer)


def share_of_random(block, fetch):
    """To first order in the blocks of a fetch; see `theory.lower_bound_bits`."""
    return np.maximum(0.0, 1 - 2.57 * block / (BATCH_SIZE * fetch))


def minibatches_in_memory(fetch, workers):
    return fetch * np.maximum(1, workers) * np.where(workers > 0, 3, 2)


def speed(configuration: Configuration) -> float:
    sizes = configuration.block_size, configuration.fetch_factor, configuration.num_workers
    return float(cells_per_second(*map(np.float64, sizes)))


def best(floor=0.95):
    """The largest throughput over a dense grid of all that meets the constraints."""
    block = np.unique(np.geomspace(1, 4096, 200).astype(int))[:, None, None]
    fetch = np.unique(np.geomspace(1, 512, 200).astype(int))[None, :, None]
    workers = np.arange(9)[None, None, :]
    memory = minibatches_in_memory(fetch, workers) * BATCH_SIZE * ROW_BYTES
    feasible = (share_of_random(block, fetch) >= floor - 0.001) & (memory <= MEMORY)
    return float(np.max(cells_per_second(block, fetch, workers) * feasible))


@dataclass
class NoisyProcess:
    """Answers as a measuring process would, at once; its clock goes on as if it had worked."""

    seed: int
    now: float = 0.0
    asked: list[Configuration] = field(default_factory=list)

    def __post_init__(self):
        self._rng = np.random.default_rng((self.seed, 1))

    def clock(self) -> float:
        return self.now

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        configuration = request.configuration
        self.asked.append(configuration)
        seconds = configuration.minibatches_per_round * BATCH_SIZE / speed(configuration)
        n_new = n_uncounted(configuration, N_CELLS)
        n_rounds = n_new + max(request.least_rounds, ceil(request.seconds / seconds))
        n_rounds = min(n_rounds, request.most_rounds, int(limit_seconds / seconds))
        noise = 0.01 * self._rng.standard_normal() + 0.02 * self._rng.standard_normal(n_rounds)
        rounds = seconds * np.exp(noise)
        self.now += 0.3 + rounds.sum()
        memory = int(configuration.minibatches_in_memory * BATCH_SIZE * ROW_BYTES)
        return timed(rounds, n_new=n_new, memory=memory)


class Replays(dict[tuple[int, int], dict[str, EntropyBits]]):
    """Entropies, each made when it is asked for first; all cells have the first label in common."""

    def __missing__(self, sizes):
        bits = BITS * float(share_of_random(*map(np.float64, sizes)))
        self[sizes] = {"species": entropy_of(BITS, BITS), "plate": entropy_of(bits, BITS)}
        return self[sizes]


def searched(space, seed, *, floor=0.95, need=None, memory=MEMORY, known=(), budget=90.0):
    """Return the search, what it chose, and the process that it ran on."""
    process: Any = NoisyProcess(seed)
    start = space.coarse_grid() if space.is_large else space.grid()
    search = search_on(
        process, Replays(), labels=["species", "plate"], n_cells=N_CELLS, row_bytes=ROW_BYTES,
        floor=floor, memory=memory, need=need, seed=seed, budget=budget, known=known,
        geometry=tahoe_like(N_CELLS, rows_per_chunk=100.0), space=space if space.is_large else None,
    )  # fmt: skip
    search.run(dict.fromkeys([*start, *known]))
    choice = search.choose(search.results(search.timed))
    return search, choice and choice.result.configuration, process


@pytest.fixture(scope="module")
def of_ranges():
    """A search of the ranges."""
    return searched(RANGES, 0)


def test_the_choice_is_within_5_percent_of_the_best_and_beats_the_default_grid(of_ranges):
    _, chosen, process = of_ranges
    _, of_grid, _ = searched(DEFAULT, 0)
    assert speed(chosen) >= 0.95 * best()
    assert speed(chosen) > speed(of_grid)
    assert process.now <= 90


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_with_other_seeds_too(seed):
    _, chosen, _ = searched(RANGES, seed)
    assert speed(chosen) >= 0.95 * best()


def test_what_misses_a_constraint_is_never_timed(of_ranges):
    search, _, process = of_ranges
    for each in process.asked:
        assert share_of_random(each.block_size, each.fetch_factor) >= 0.949, each
        assert each.minibatches_in_memory * BATCH_SIZE * ROW_BYTES <= MEMORY, each
    assert set(process.asked) == set(search.timed)


def test_few_pairs_of_sizes_are_replayed(of_ranges):
    search, _, _ = of_ranges
    coarse = {(each.block_size, each.fetch_factor) for each in RANGES.coarse_grid()}
    assert search.n_considered > len(coarse)
    assert len(search.requirements.entropies) < len(coarse) + 2 * len(search.timed)


@pytest.mark.parametrize(("share", "seed"), [(0.4, 0), (0.6, 1), (0.8, 0), (0.8, 2)])
def test_with_a_need_what_mixes_best_of_the_fast_ones_is_looked_for(share, seed):
    need = share * best()
    search, chosen, _ = searched(RANGES, seed, need=need, budget=60.0)
    block, fetch, workers = np.ix_(np.arange(1, 129), np.arange(1, 513), np.arange(9))
    fast = cells_per_second(block, fetch, workers) >= need
    fits = minibatches_in_memory(fetch, workers) * BATCH_SIZE * ROW_BYTES <= MEMORY
    shares = np.broadcast_to(share_of_random(block, fetch), fast.shape)
    assert speed(chosen) >= 0.95 * need
    found = share_of_random(chosen.block_size, chosen.fetch_factor)
    assert found >= shares[fast & fits].max() - 0.015
    assert len(search.requirements.entropies) < 200


def test_where_nothing_of_the_coarse_grid_is_feasible_proposals_find_what_is():
    space, floor, most = Space.of(range(20, 410), range(8, 501), range(9)), 0.996, 250
    settings = {"floor": floor, "memory": int(most * BATCH_SIZE * ROW_BYTES)}

    def is_feasible(each):
        share = share_of_random(each.block_size, each.fetch_factor)
        return (
            share >= floor - 0.001 and 2 * each.fetch_factor <= 2 * most and each.num_workers == 0
        )

    settings["memory"] *= 2  # while one fetch is dealt out, the next is read
    assert not any(is_feasible(each) for each in space.coarse_grid())
    _, chosen, process = searched(space, 0, budget=600.0, **settings)
    assert is_feasible(chosen)
    assert all(is_feasible(each) for each in process.asked)


def test_what_an_earlier_run_measured_may_be_chosen(of_ranges):
    _, chosen, _ = of_ranges
    assert chosen not in RANGES.coarse_grid()
    _, choice, process = searched(RANGES, 1, known=[chosen])
    assert process.asked[0] == chosen
    assert speed(choice) >= 0.95 * best()
