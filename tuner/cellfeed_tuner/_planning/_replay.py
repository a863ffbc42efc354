"""The search, played on a recorded grid in place of a disk."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from cellfeed import FormatError, ParameterError
from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._measuring._measure import LEAST_ROUNDS, Measurement
from cellfeed_tuner._planning._cost_model import Geometry
from cellfeed_tuner._planning._goal import fastest
from cellfeed_tuner._planning._planner import Planner
from cellfeed_tuner._planning._recommend import choose
from cellfeed_tuner._result import ConfigurationResult, Constraints, EntropyBits

__all__ = ["RecordedGrid", "Replay", "read_grid", "replay"]

_SETTINGS = ["block_size", "fetch_factor", "num_workers"]
_MEMORY_BYTES = 1 << 60  # a recording does not say how much there was, so none is too much


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGrid:
    """Throughputs of block shuffling that were recorded once.

    Parameters
    ----------
    configurations
        What was measured.
    runs
        Cells per second of the runs of each, shape (number of its runs,).
    entropies
        Minibatch label entropy of each in bits.
    random_entropy
        That of true random sampling.
    batch_size
        Cells of a minibatch.
    """

    configurations: tuple[Configuration, ...]
    runs: tuple[NDArray[np.float64], ...]
    entropies: tuple[float, ...]
    random_entropy: float
    batch_size: int

    def __len__(self) -> int:
        return len(self.configurations)

    def cells_per_second(self) -> dict[Configuration, float]:
        """Return the throughput of each over all of its runs."""
        means = [float(1 / np.mean(1 / each)) for each in self.runs]
        return dict(zip(self.configurations, means, strict=True))

    def feasible(self, floor: float) -> list[Configuration]:
        """Return what mixes well enough."""
        least = floor * self.random_entropy
        pairs = zip(self.configurations, self.entropies, strict=True)
        return [configuration for configuration, entropy in pairs if entropy >= least]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How well the search did at one entropy floor.

    Parameters
    ----------
    floor
        Least entropy, as a share of true random sampling's.
    n_configurations, n_feasible
        Size of the grid, and how many configurations of it mix well enough.
    best
        The fastest of these; None if there are none.
    best_cells_per_second
        Its recorded throughput.
    chosen
        What the search chose with each seed.
    regrets
        By which share of the best that is slower, with each seed.
    shares_measured
        Share of the grid that was measured, with each seed.
    """

    floor: float
    n_configurations: int
    n_feasible: int
    best: Configuration | None
    best_cells_per_second: float | None
    chosen: tuple[Configuration, ...]
    regrets: tuple[float, ...]
    shares_measured: tuple[float, ...]

    def share_within(self, regret: float) -> float:
        """Return the share of the seeds whose choice is at most so much slower than the best."""
        return float(np.mean(np.array(self.regrets) <= regret)) if self.regrets else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"within_5_percent": self.share_within(0.05)}


def read_grid(
    path: Path, *, distribution: ArrayLike | None = None, batch_size: int = 64
) -> RecordedGrid:
    """Read a recorded grid from a CSV file.

    Parameters
    ----------
    path
        A table with columns ``block_size``, ``fetch_factor``, ``cells_per_second``, and where
        known ``num_workers`` (else 0) and ``entropy_bits``. Rows without a block size or a fetch
        factor are left out, and where there is a column ``strategy``, all but "BlockShuffling".
        Several rows of one configuration are several runs of it.
    distribution
        Label frequencies or counts, shape (K,). With it, random sampling's entropy is the exact
        expectation, and so is that of every configuration where none is recorded. Without it,
        random sampling's is what was recorded at block size 1, or else the highest.
    batch_size
        Cells of a minibatch.

    Raises
    ------
    FormatError
        The file is not such a table.
    ParameterError
        It has no entropies, and there is no distribution.
    """
    table = _block_shuffling(_read(path), path)
    runs = table.groupby(_SETTINGS, sort=True)
    configurations = [
        Configuration(block_size=int(block), fetch_factor=int(fetch), num_workers=int(workers))
        for block, fetch, workers in runs.size().index.to_list()
    ]
    recorded = "entropy_bits" in table
    if not recorded and distribution is None:
        msg = f"{path} has no column entropy_bits; say how labels are distributed"
        raise ParameterError(msg)
    if recorded:
        entropies = runs["entropy_bits"].mean().tolist()
    else:
        entropies = [
            theory.expected_entropy_bits(
                np.asarray(distribution), batch_size, each.block_size, each.fetch_factor
            )
            for each in configurations
        ]
    return RecordedGrid(
        configurations=tuple(configurations),
        runs=tuple(part.to_numpy(np.float64) for _, part in runs["cells_per_second"]),
        entropies=tuple(entropies),
        random_entropy=_random_entropy(configurations, entropies, distribution, batch_size),
        batch_size=batch_size,
    )


def replay(
    grid: RecordedGrid,
    *,
    floors: Sequence[float] = (0.9, 0.95, 0.99),
    share: float = 0.25,
    n_seeds: int = 100,
    noise: float = 0.03,
    geometry: Geometry | None = None,
) -> list[Replay]:
    """Search a recorded grid again and again, and compare what is chosen with the best.

    It is the search that runs on a disk, with the rule by which it chooses; where there the
    budget is time, here it is the share of the grid that may be measured. What mixes too little
    is known before, and never measured.

    Parameters
    ----------
    grid
        What was recorded.
    floors
        Least entropies, as shares of true random sampling's.
    share
        Share of the grid that may be measured, all configurations counted.
    n_seeds
        How many searches to run at each floor.
    noise
        Relative spread of the samples of a configuration of which there is one run; where there
        are more, samples are drawn from these.
    geometry
        What is known of the storage.

    Raises
    ------
    ParameterError
        A floor or the share is not within 0 and 1, or there are no seeds.
    """
    for name, value in (("share", share), *(("floor", each) for each in floors)):
        if not 0 <= value <= 1:
            msg = f"`0 <= {name} <= 1` must hold, but got {name}={value}"
            raise ParameterError(msg)
    if n_seeds < 1:
        msg = f"`n_seeds >= 1` must hold, but got n_seeds={n_seeds}"
        raise ParameterError(msg)
    most = max(1, int(share * len(grid)))
    return [
        _replay_at(grid, floor, most, n_seeds, noise, geometry or Geometry()) for floor in floors
    ]


def _replay_at(
    grid: RecordedGrid, floor: float, most: int, n_seeds: int, noise: float, geometry: Geometry
) -> Replay:
    speeds, feasible = grid.cells_per_second(), grid.feasible(floor)
    best = max(feasible, key=speeds.__getitem__, default=None)
    searches = [
        _Search(grid=grid, floor=floor, most=most, noise=noise, geometry=geometry, seed=seed)
        for seed in range(n_seeds if feasible else 0)
    ]
    chosen = tuple(search.run() for search in searches)
    return Replay(
        floor=floor,
        n_configurations=len(grid),
        n_feasible=len(feasible),
        best=best,
        best_cells_per_second=None if best is None else speeds[best],
        chosen=chosen,
        regrets=tuple(1 - speeds[each] / speeds[best] for each in chosen if best is not None),
        shares_measured=tuple(len(search.measurements) / len(grid) for search in searches),
    )


@dataclass(slots=True, kw_only=True)
class _Search:
    """One search of a recorded grid."""

    grid: RecordedGrid
    floor: float
    most: int
    noise: float
    geometry: Geometry
    seed: int
    measurements: dict[Configuration, Measurement] = field(default_factory=dict)

    def run(self) -> Configuration:
        """Measure as the planner says, and return the choice."""
        planner = Planner(
            self.grid.feasible(self.floor),
            batch_size=self.grid.batch_size,
            geometry=self.geometry,
            goal=fastest,
            seed=self.seed,
        )
        # Apart from the planner's chance, so that the two have nothing to do with each other.
        rng = np.random.default_rng((self.seed, 1))
        runs = dict(zip(self.grid.configurations, self.grid.runs, strict=True))
        while (configuration := planner.ask(self)) is not None:
            measurement = self._measure(configuration, runs[configuration], rng)
            self.measurements[configuration] = measurement
            cells = measurement.cells_per_round
            planner.tell(configuration, (each / cells for each in measurement.round_seconds))
        return self._choice()

    def affords(self, configuration: Configuration) -> bool:
        """Return whether the share of the grid allows it."""
        return configuration in self.measurements or len(self.measurements) < self.most

    def cost(self, _: Configuration) -> float:
        """Return 1: what counts is how many configurations are measured."""
        return 1.0

    def _measure(
        self, configuration: Configuration, runs: NDArray[np.float64], rng: np.random.Generator
    ) -> Measurement:
        """Return what is known of a configuration after another few rounds."""
        known = self.measurements.get(configuration)
        cells = configuration.minibatches_per_round * self.grid.batch_size
        speeds = rng.choice(runs, LEAST_ROUNDS)
        if runs.size == 1:
            speeds = speeds * np.exp(self.noise * rng.standard_normal(LEAST_ROUNDS))
        return Measurement(
            configuration=configuration,
            cache="unknown",
            cells_per_round=cells,
            round_seconds=(known.round_seconds if known else ()) + tuple(cells / speeds),
            # Not bytes, but as memory grows.
            peak_memory_bytes=configuration.minibatches_in_memory * self.grid.batch_size,
        )

    def _choice(self) -> Configuration:
        entropies = dict(zip(self.grid.configurations, self.grid.entropies, strict=True))
        results = [
            ConfigurationResult(
                configuration=configuration,
                status=measurement.status,
                entropy_bits=_entropy(entropies[configuration], self.grid.random_entropy),
                cells_per_second=measurement.cells_per_second,
                peak_memory_bytes=measurement.peak_memory_bytes,
            )
            for configuration, measurement in self.measurements.items()
        ]
        constraints = Constraints(
            entropy_floor=self.floor, memory_bytes=_MEMORY_BYTES, need_cells_per_second=None
        )
        choice = choose(results, constraints)
        assert choice is not None, "all that was measured is feasible"  # noqa: S101
        return choice.result.configuration


def _entropy(bits: float, random: float) -> EntropyBits:
    return EntropyBits(
        measured=None,
        expected=Estimate(bits, bits, bits),
        homogeneous=bits,
        lower_bound=0.0,
        upper_bound=random,
        random=random,
    )


def _read(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(path)
    except (ValueError, UnicodeDecodeError) as error:
        msg = f"{path}: not a CSV file: {error}"
        raise FormatError(msg) from error
    if "num_workers" not in table:
        table["num_workers"] = 0
    missing = {*_SETTINGS, "cells_per_second"} - set(table)
    if missing:
        msg = f"{path}: has no column {', '.join(sorted(missing))}"
        raise FormatError(msg)
    return table


def _block_shuffling(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    if "strategy" in table:
        table = table[table["strategy"] == "BlockShuffling"]
    table = table.dropna(subset=["block_size", "fetch_factor"]).fillna({"num_workers": 0})
    if table.empty:
        msg = f"{path}: has no row of block shuffling with a block size and a fetch factor"
        raise FormatError(msg)
    columns = [*_SETTINGS, "cells_per_second", *({"entropy_bits"} & set(table))]
    try:
        numbers = table[columns].astype(np.float64)
    except ValueError as error:
        msg = f"{path}: a column holds something other than numbers: {error}"
        raise FormatError(msg) from error
    if not np.isfinite(numbers).all(axis=None) or not (numbers["cells_per_second"] > 0).all():
        msg = f"{path}: throughputs must be above 0, and no number may be missing"
        raise FormatError(msg)
    if not (numbers[_SETTINGS] % 1 == 0).all(axis=None):
        msg = f"{path}: each of {', '.join(_SETTINGS)} must be a whole number"
        raise FormatError(msg)
    return numbers


def _random_entropy(
    configurations: Sequence[Configuration],
    entropies: Sequence[float],
    distribution: ArrayLike | None,
    batch_size: int,
) -> float:
    if distribution is not None:
        return theory.expected_entropy_bits(np.asarray(distribution), batch_size, 1, 1)
    pairs = zip(configurations, entropies, strict=True)
    at_random = [entropy for each, entropy in pairs if each.block_size == 1]
    return float(np.mean(at_random)) if at_random else max(entropies)
