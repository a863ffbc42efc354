"""The search, played on a recorded grid in place of a disk."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._measuring._measure import LEAST_ROUNDS, Measurement
from cellfeed_tuner._planning._goal import fastest
from cellfeed_tuner._planning._planner import Planner
from cellfeed_tuner._planning._recommend import choose
from cellfeed_tuner._recording._recorded_grid import RecordedGrid
from cellfeed_tuner._results._configuration_result import ConfigurationResult, EntropyBits
from cellfeed_tuner._results._recommended import Constraints

__all__ = ["Replay", "replay"]

_MEMORY_BYTES = 1 << 60  # a recording does not say how much there was, so none is too much


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
    random_regrets
        Regrets of as many configurations as the search may measure, drawn at random from those
        that mix well enough, of which the fastest is known without error.
    """

    floor: float
    n_configurations: int
    n_feasible: int
    best: Configuration | None
    best_cells_per_second: float | None
    chosen: tuple[Configuration, ...]
    regrets: tuple[float, ...]
    shares_measured: tuple[float, ...]
    random_regrets: tuple[float, ...]

    def n_within(self, regret: float) -> int:
        """Return with how many seeds the choice is at most so much slower than the best."""
        return sum(each <= regret for each in self.regrets)

    def n_random_within(self, regret: float) -> int:
        """Return the same of what is drawn at random."""
        return sum(each <= regret for each in self.random_regrets)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        n_seeds = max(1, len(self.regrets))
        return asdict(self) | {
            "within_5_percent": self.n_within(0.05) / n_seeds,
            "random_within_5_percent": self.n_random_within(0.05) / n_seeds,
        }


def replay(
    grid: RecordedGrid,
    *,
    floors: Sequence[float] = (0.9, 0.95, 0.99),
    share: float = 0.25,
    n_seeds: int = 100,
    noise: float = 0.03,
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
        Relative spread of the samples of a configuration of which there is one run. Where there
        are more, each sample is one of these; or, where the spread within runs was recorded,
        each look at a configuration is one of these, and its samples spread about that.

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
    return [_replay_at(grid, floor, most, n_seeds, noise) for floor in floors]


def _replay_at(grid: RecordedGrid, floor: float, most: int, n_seeds: int, noise: float) -> Replay:
    speeds, feasible = grid.cells_per_second(), grid.feasible(floor)
    best = max(feasible, key=speeds.__getitem__, default=None)
    searches = [
        _Search(grid=grid, floor=floor, most=most, noise=noise, seed=seed)
        for seed in range(n_seeds if feasible else 0)
    ]
    chosen = tuple(search.run() for search in searches)
    drawn = [_fastest_of_some(feasible, speeds, most, search.seed) for search in searches]
    return Replay(
        floor=floor,
        n_configurations=len(grid),
        n_feasible=len(feasible),
        best=best,
        best_cells_per_second=None if best is None else speeds[best],
        chosen=chosen,
        regrets=tuple(1 - speeds[each] / speeds[best] for each in chosen if best is not None),
        random_regrets=tuple(1 - each / speeds[best] for each in drawn if best is not None),
        shares_measured=tuple(len(search.measurements) / len(grid) for search in searches),
    )


def _fastest_of_some(
    feasible: Sequence[Configuration], speeds: Mapping[Configuration, float], most: int, seed: int
) -> float:
    """Return the highest throughput among some that are drawn at random."""
    # Apart from the chances of the search.
    rng = np.random.default_rng((seed, 2))
    drawn = rng.choice(len(feasible), min(most, len(feasible)), replace=False)
    return max(speeds[feasible[place]] for place in drawn)


@dataclass(slots=True, kw_only=True)
class _Search:
    """One search of a recorded grid."""

    grid: RecordedGrid
    floor: float
    most: int
    noise: float
    seed: int
    measurements: dict[Configuration, Measurement] = field(default_factory=dict)

    def run(self) -> Configuration:
        """Measure as the planner says, and return the choice."""
        planner = Planner(
            self.grid.feasible(self.floor),
            batch_size=self.grid.batch_size,
            geometry=self.grid.geometry,
            goal=fastest,
            seed=self.seed,
        )
        # Apart from the planner's chance, so that the two have nothing to do with each other.
        rng = np.random.default_rng((self.seed, 1))
        places = {each: place for place, each in enumerate(self.grid.configurations)}
        while (configuration := planner.ask(self)) is not None:
            measurement = self._measure(configuration, places[configuration], rng)
            self.measurements[configuration] = measurement
            cells = measurement.cells_per_round
            samples = np.array(measurement.round_seconds) / cells
            planner.tell(configuration, samples.reshape(-1, LEAST_ROUNDS).tolist())
        return self._choice()

    def affords(self, configuration: Configuration) -> bool:
        """Return whether the share of the grid allows it."""
        return configuration in self.measurements or len(self.measurements) < self.most

    def cost(self, _: Configuration) -> float:
        """Return 1: what counts is how many configurations are measured."""
        return 1.0

    def _measure(
        self, configuration: Configuration, place: int, rng: np.random.Generator
    ) -> Measurement:
        """Return what is known of a configuration after another look."""
        known = self.measurements.get(configuration)
        cells = configuration.minibatches_per_round * self.grid.batch_size
        peaks = self.grid.peak_memory_bytes
        return Measurement(
            configuration=configuration,
            cache="unknown",
            cells_per_round=cells,
            round_seconds=(known.round_seconds if known else ())
            + tuple(cells / self._look(place, rng)),
            # Where it was not recorded: not bytes, but as memory grows.
            peak_memory_bytes=int(peaks[place])
            if peaks
            else configuration.minibatches_in_memory * self.grid.batch_size,
        )

    def _look(self, place: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return cells per second, a few samples of what one look brings."""
        runs = self.grid.runs[place]
        departures = rng.standard_normal(LEAST_ROUNDS)
        if self.grid.spreads is not None:
            run = rng.integers(runs.size)
            spread = float(self.grid.spreads[place][run])
            return float(runs[run]) * np.exp(spread * departures)
        if runs.size == 1:
            return float(runs[0]) * np.exp(self.noise * departures)
        return rng.choice(runs, LEAST_ROUNDS)

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
