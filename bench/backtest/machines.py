"""Simulated machines, to none of which the search was fitted, and how good its choices are there.

Eight have other bottlenecks than the cost model's, and two have no structure at all. Each is drawn
many times, with other prices. ``python -m bench.backtest machines`` prints the table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import click
import numpy as np
from bench.backtest.recorded_grid import RecordedGrid
from bench.backtest.replay import GOOD_REGRET, markdown_table, replay
from numpy.typing import NDArray

from cellfeed.console import OneLineErrorCommand
from cellfeed_tuner import Configuration, theory

Values = NDArray[np.float64]

BATCH_SIZE, N_CELLS = 64, 1_000_000
CONFIGURATIONS = tuple(
    Configuration(block_size=b, fetch_factor=f, num_workers=w)
    for b, f, w in product((1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256), (0, 1, 2, 4))
)
FLOORS, NOISES = (0.9, 0.95, 0.99), (0.05, 0.15)
# How often each machine is drawn, and the searches on each draw.
N_DRAWS, N_SEEDS = 15, 2
# Cells per second of the fastest configuration, and what a search has: four times the default,
# since workers are up to four, and fetches are of 65,536 cells then.
FASTEST, SECONDS = 20_000.0, 180.0


class Settings(NamedTuple):
    """Settings of all configurations, each of shape (n_configurations,)."""

    block: Values
    cells: Values
    workers: Values

    @property
    def blocks(self) -> Values:
        """Blocks of a fetch."""
        return np.maximum(1.0, self.cells / self.block)

    @property
    def processes(self) -> Values:
        """Processes that fetch."""
        return np.maximum(1.0, self.workers)


SETTINGS = Settings(
    *np.array(
        [(e.block_size, BATCH_SIZE * e.fetch_factor, e.num_workers) for e in CONFIGURATIONS],
        dtype=np.float64,
    ).T
)


class Drawn(NamedTuple):
    """One machine: seconds per cell, and bytes at most, of each configuration."""

    seconds: Values
    memory: Values | None = None
    limit: int = 1 << 60


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def _slower_of(*seconds: Values | float) -> Values:
    """Return the time of what runs side by side: about that of the slowest."""
    total = sum(np.asarray(each) ** 4 for each in seconds)
    return np.asarray(total**0.25, dtype=np.float64)


def network_share(rng: np.random.Generator, s: Settings) -> Drawn:
    """Requests have latency and run side by side, until the link is full."""
    requests = _between(rng, 4, 32)
    waiting = _between(rng, 1e-3, 2e-2) * np.ceil(s.blocks / requests) / s.cells
    decoding = _between(rng, 1e-5, 1e-4)
    sending = _between(rng, 1e-6, 2e-5) * (s.workers > 0)
    return Drawn(
        _slower_of((waiting + decoding) / s.processes + sending, _between(rng, 2e-5, 2e-4))
    )


def two_workers(rng: np.random.Generator, s: Settings) -> Drawn:
    """Only exactly two workers pay."""
    seconds = _between(rng, 3e-3, 3e-2) / s.cells + _between(rng, 1e-4, 1e-3) / s.block
    seconds = seconds + _between(rng, 2e-5, 1e-4)
    factors = {0: 1.0, 1: rng.uniform(0.95, 1.2), 2: rng.uniform(0.65, 0.8)}
    factors[4] = rng.uniform(0.95, 1.4)
    return Drawn(seconds * np.array([factors[int(each)] for each in s.workers]))


def spinning_disk(rng: np.random.Generator, s: Settings) -> Drawn:
    """One head: the more sorted blocks, the shorter its ways; workers pull it to and fro."""
    turn, stroke = _between(rng, 3e-3, 6e-3), _between(rng, 5e-3, 1.5e-2)
    seeks = s.blocks * (turn + stroke / np.sqrt(s.blocks))
    to_and_fro = 1 + _between(rng, 0.05, 0.5) * np.maximum(0, s.workers - 1)
    reading = seeks * to_and_fro / s.cells + _between(rng, 1e-5, 5e-5)
    decoding = _between(rng, 3e-5, 3e-4) / s.processes + 1e-5 * (s.workers > 0)
    return Drawn(_slower_of(reading, decoding) + _between(rng, 1e-3, 1e-2) / s.cells)


def memory_cliff(rng: np.random.Generator, s: Settings) -> Drawn:
    """Buffers that no longer fit in fast memory cost a multiple."""
    seconds = _between(rng, 1e-2, 1e-1) / s.cells + _between(rng, 1e-5, 1e-4) / s.block
    seconds = (seconds + _between(rng, 1e-5, 1e-4)) / s.processes ** rng.uniform(0, 0.8)
    is_beyond = s.cells * (1 + s.workers) > _between(rng, 2e3, 3e4)
    return Drawn(seconds * np.where(is_beyond, _between(rng, 1.5, 4), 1.0))


def three_labels(rng: np.random.Generator, s: Settings) -> Drawn:
    """Three labels with runs of other lengths (see `_shares`) on a compressed file."""
    rows = _between(rng, 16, 256)
    chunks = s.blocks * (1 + (np.minimum(s.block, s.cells) - 1) / rows)
    seconds = _between(rng, 1e-3, 1e-2) + _between(rng, 2e-4, 2e-3) * chunks
    seconds = seconds / s.cells + _between(rng, 1e-5, 5e-5)
    share = rng.uniform(0.2, 0.9)
    return Drawn(seconds * (share + (1 - share) / s.processes) + 2e-5 * (s.workers > 0))


def memory_unknown(rng: np.random.Generator, s: Settings) -> Drawn:
    """Large fetches are fast, and take too much memory, which only measuring shows."""
    seconds = _between(rng, 3e-2, 0.3) / s.cells + _between(rng, 1e-5, 1e-4) / s.block
    seconds = (seconds + _between(rng, 2e-5, 1e-4)) / s.processes ** rng.uniform(0, 0.9)
    bytes_per_cell = _between(rng, 2e4, 2e5)
    memory = 3e8 + bytes_per_cell * s.cells * (2 + 3 * s.workers) + 2e8 * s.workers
    return Drawn(seconds, memory, limit=int(np.quantile(memory, rng.uniform(0.4, 0.9))))


def large_chunks(rng: np.random.Generator, s: Settings) -> Drawn:
    """Thousands of rows are decompressed at once, of which nothing is said beforehand."""
    rows = _between(rng, 1e3, 1e4)
    n_chunks = N_CELLS / rows
    touched = n_chunks * -np.expm1(s.blocks * np.log1p(-1 / n_chunks)) * (1 + s.block / rows)
    seconds = _between(rng, 2e-6, 2e-5) * rows * touched / s.cells + _between(rng, 1e-5, 1e-4)
    return Drawn(seconds / s.processes ** rng.uniform(0.3, 1.0) + 1e-5 * (s.workers > 0))


def sorting(rng: np.random.Generator, s: Settings) -> Drawn:
    """Rows of a fetch are sorted and copied, the slower the more there are."""
    seconds = _between(rng, 5e-3, 5e-2) / s.cells + _between(rng, 1e-5, 1e-4) / s.block
    copying = _between(rng, 1e-5, 1e-4) * (s.cells / 1024) ** rng.uniform(0.2, 0.6)
    return Drawn((seconds + copying) / s.processes ** rng.uniform(0, 0.6))


def permuted(rng: np.random.Generator, s: Settings) -> Drawn:
    """Costs as of `sorting`, each of another configuration."""
    return Drawn(rng.permutation(sorting(rng, s).seconds))


def independent(rng: np.random.Generator, s: Settings) -> Drawn:
    """Costs that have nothing in common."""
    return Drawn(1e-4 * np.exp(rng.uniform(0.3, 0.7) * rng.standard_normal(len(s.cells))))


MACHINES: Mapping[str, Callable[[np.random.Generator, Settings], Drawn]] = {
    each.__name__.replace("_", " "): each
    for each in (
        *(network_share, two_workers, spinning_disk, memory_cliff, three_labels),
        *(memory_unknown, large_chunks, sorting, permuted, independent),
    )
}

# Numbers of values of each label, and rows in which a value stays the same.
_LABELS = ((14, N_CELLS),)
_THREE_LABELS = ((14, N_CELLS), (50, 48), (380, 6))


@lru_cache
def _shares(labels: tuple[tuple[int, int], ...]) -> tuple[float, ...]:
    """Return the entropy of the least mixed label in each configuration, as a share of random."""

    def share(n_values: int, block: int, fetch: int) -> float:
        bits = [
            theory.expected_entropy_bits([1] * n_values, BATCH_SIZE, *sizes)
            for sizes in ((block, fetch), (1, 1))
        ]
        return bits[0] / bits[1]

    return tuple(
        min(share(n, min(each.block_size, run), each.fetch_factor) for n, run in labels)
        for each in CONFIGURATIONS
    )


def drawn_grid(name: str, number: int) -> RecordedGrid:
    """Return what a machine gives without noise: the same for the same number."""
    place = list(MACHINES).index(name)
    drawn = MACHINES[name](np.random.default_rng((place, number)), SETTINGS)
    unit = 1 / FASTEST / drawn.seconds.min()
    return RecordedGrid(
        configurations=CONFIGURATIONS,
        runs=tuple(np.array([1 / each]) for each in unit * drawn.seconds),
        entropies=_shares(_THREE_LABELS if name == "three labels" else _LABELS),
        random_entropy=1.0,
        batch_size=BATCH_SIZE,
        peak_memory_bytes=None if drawn.memory is None else tuple(drawn.memory.tolist()),
        n_cells=N_CELLS,
        memory_limit=drawn.limit,
    )


HEADINGS = ("machine", "noise", "within 5 %", "undecided", "wrong and unsaid", "random search")


def machine_rows(
    names: Iterable[str] = MACHINES, *, draws: int = N_DRAWS, seeds: int = N_SEEDS
) -> Iterator[list[str]]:
    """Yield a row of the table for each machine at each noise, in the order of the headings.

    Shares of all searches, on each draw of the machine with each seed: those at most 5 % slower
    than the best; undecided, by their own report; more than 5 % slower, and said nothing of it; and
    of random searches with as much time, those within 5 % of the best.
    """
    for name, noise in product(names, NOISES):
        found = [
            each
            for number in range(draws)
            for each in replay(
                drawn_grid(name, number),
                floors=[FLOORS[number % len(FLOORS)]],
                n_seeds=seeds,
                spread=noise,
                seconds=SECONDS,
                baselines=["random"],
            )
        ]
        is_good = np.concatenate([each.regrets for each in found]) <= GOOD_REGRET
        undecided = np.concatenate([each.undecided for each in found])
        random = [each.share_within("random") for each in found]
        shares = (is_good, undecided, ~is_good & ~undecided, random)
        yield [name, f"{noise:.0%}", *(f"{np.mean(each):.0%}" for each in shares)]


@click.command("machines", cls=OneLineErrorCommand)
@click.argument("names", nargs=-1, type=click.Choice(list(MACHINES)), metavar="[MACHINE...]")
@click.option("--draws", default=N_DRAWS, show_default=True, type=click.IntRange(min=1),
              help="How often each machine is drawn.")  # fmt: skip
@click.option("--seeds", default=N_SEEDS, show_default=True, type=click.IntRange(min=1),
              help="Searches on each draw.")  # fmt: skip
def machines_command(*, names: tuple[str, ...], draws: int, seeds: int) -> None:
    """Search on simulated machines, and print how good the choices are."""
    rows = machine_rows(names or MACHINES, draws=draws, seeds=seeds)
    click.echo(markdown_table(rows, HEADINGS))
