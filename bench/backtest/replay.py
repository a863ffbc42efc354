"""The search on a recorded grid, again and again, and how good its choices are."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from bench.backtest.baselines import BASELINES
from bench.backtest.recorded_grid import RecordedGrid
from bench.backtest.recorded_process import RecordedProcess

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._defaults import DEFAULT_REPLAY_SECONDS
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._planning._recommend import choose
from cellfeed_tuner._results._configuration_result import EntropyBits
from cellfeed_tuner._results._recommended import Constraints
from cellfeed_tuner._searching._measurements import Measurements
from cellfeed_tuner._searching._requirements import Requirements
from cellfeed_tuner._searching._search import Search
from cellfeed_tuner._searching._time_budget import TimeBudget

__all__ = ["Replay", "replay"]

_MEMORY_BYTES = 1 << 60  # a recording does not say how much there was, so none is too much
_LABEL = "label"
GOOD_REGRET = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How well the search did at one entropy floor.

    Parameters
    ----------
    floor
        Least entropy, as a share of true random sampling's.
    spread
        Relative spread of replicates that was played.
    n_configurations, n_feasible
        Size of the grid, and how many configurations of it mix well enough.
    best
        The fastest of these; None if there are none.
    best_cells_per_second
        Its recorded throughput.
    chosen
        What the search chose with each seed; None where it came to no choice.
    regrets
        By which share of the best that is slower, with each seed; 1 where there is none.
    undecided
        Whether it said that it was undecided between what it chose and something that is at most
        5 % slower than the best, with each seed.
    shares_measured
        Share of the grid that was measured, with each seed.
    n_replicates
        How often anything was measured, with each seed.
    baseline_regrets
        Regrets of simpler searches with as much time, by name.
    """

    floor: float
    spread: float
    n_configurations: int
    n_feasible: int
    best: Configuration | None
    best_cells_per_second: float | None
    chosen: tuple[Configuration | None, ...]
    regrets: tuple[float, ...]
    undecided: tuple[bool, ...]
    shares_measured: tuple[float, ...]
    n_replicates: tuple[int, ...]
    baseline_regrets: Mapping[str, tuple[float, ...]]

    def n_within(self, regret: float = GOOD_REGRET) -> int:
        """Return with how many seeds the choice is at most so much slower than the best."""
        return sum(each <= regret for each in self.regrets)

    def n_baseline_within(self, name: str, regret: float = GOOD_REGRET) -> int:
        """Return the same of a simpler search."""
        return sum(each <= regret for each in self.baseline_regrets[name])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        n_seeds = max(1, len(self.regrets))
        return asdict(self) | {
            "best": self.best and dict(self.best),
            "chosen": [each and dict(each) for each in self.chosen],
            "within_5_percent": self.n_within() / n_seeds,
            "baselines_within_5_percent": {
                name: self.n_baseline_within(name) / n_seeds for name in self.baseline_regrets
            },
        }


def replay(
    grid: RecordedGrid,
    *,
    floors: Sequence[float] = (0.9, 0.95, 0.99),
    seconds: float = DEFAULT_REPLAY_SECONDS,
    n_seeds: int = 100,
    spread: float | None = None,
    baselines: Sequence[str] = (),
) -> list[Replay]:
    """Search a recorded grid again and again, and compare what is chosen with the best.

    It is the search that runs on a disk, with the rule by which it chooses: what is played is the
    time that each replicate takes, and by how much it is off. What mixes too little is known
    before, and never measured.

    Parameters
    ----------
    grid
        What was recorded.
    floors
        Least entropies, as shares of true random sampling's.
    seconds
        How long to measure.
    n_seeds
        How many searches to run at each floor.
    spread
        Relative spread of replicates; if None, that of the grid's runs, and 5 % where there is
        one run only.
    baselines
        Simpler searches to hold it against, with as much time: "six largest" measures the six
        configurations with the largest fetches and blocks, without workers, in turns; "TPE" what
        Optuna's sampler of that name proposes.

    Raises
    ------
    ParameterError
        A floor is not within 0 and 1, there are no seeds, or there is no time.
    """
    for floor in floors:
        if not 0 <= floor <= 1:
            msg = f"`0 <= floor <= 1` must hold, but got floor={floor}"
            raise ParameterError(msg)
    if n_seeds < 1:
        msg = f"`n_seeds >= 1` must hold, but got n_seeds={n_seeds}"
        raise ParameterError(msg)
    if seconds <= 0:
        msg = f"`seconds > 0` must hold, but got seconds={seconds}"
        raise ParameterError(msg)
    spread = grid.replicate_spread() if spread is None else spread
    return [_replay_at(grid, floor, seconds, n_seeds, spread, baselines) for floor in floors]


@dataclass(frozen=True, slots=True)
class _Found:
    """What came of one search."""

    chosen: Configuration | None
    undecided_between: tuple[Configuration, ...]
    n_measured: int
    n_replicates: int


def _replay_at(
    grid: RecordedGrid,
    floor: float,
    seconds: float,
    n_seeds: int,
    spread: float,
    baselines: Sequence[str],
) -> Replay:
    speeds, feasible = grid.cells_per_second(), grid.feasible(floor)
    best = max(feasible, key=speeds.__getitem__, default=None)
    seeds = range(n_seeds if feasible else 0)
    found = [_search(grid, floor, _process(grid, spread, seed), seconds, seed) for seed in seeds]

    def regret(chosen: Configuration | None) -> float:
        return 1.0 if chosen is None or best is None else 1 - speeds[chosen] / speeds[best]

    def baseline(name: str, seed: int) -> float:
        measurements = _measurements(_process(grid, spread, seed), seconds, seed)
        return regret(BASELINES[name](measurements, feasible, seed))

    return Replay(
        floor=floor,
        spread=spread,
        n_configurations=len(grid),
        n_feasible=len(feasible),
        best=best,
        best_cells_per_second=None if best is None else speeds[best],
        chosen=tuple(each.chosen for each in found),
        regrets=tuple(regret(each.chosen) for each in found),
        undecided=tuple(
            any(regret(other) <= GOOD_REGRET for other in each.undecided_between) for each in found
        ),
        shares_measured=tuple(each.n_measured / len(grid) for each in found),
        n_replicates=tuple(each.n_replicates for each in found),
        baseline_regrets={
            name: tuple(baseline(name, seed) for seed in seeds) for name in baselines
        },
    )


def _process(grid: RecordedGrid, spread: float, seed: int) -> RecordedProcess:
    # Apart from the planner's chance, so that the two have nothing to do with each other.
    return RecordedProcess(grid=grid, spread=spread, rng=np.random.default_rng((seed, 1)))


def _measurements(process: RecordedProcess, seconds: float, seed: int) -> Measurements:
    return Measurements(
        process=process,
        labels=[_LABEL],
        batch_size=process.grid.batch_size,
        cache="cold",
        seed=seed,
        budget=TimeBudget(seconds, process.clock),
    )


def _search(
    grid: RecordedGrid, floor: float, process: RecordedProcess, seconds: float, seed: int
) -> _Found:
    constraints = Constraints(
        entropy_floor=floor, memory_bytes=_MEMORY_BYTES, need_cells_per_second=None
    )
    search = Search(
        measurements=_measurements(process, seconds, seed),
        requirements=Requirements(
            n_cells=grid.geometry.n_cells or _MEMORY_BYTES,
            row_bytes=1.0,
            batch_size=grid.batch_size,
            constraints=constraints,
            entropies=_entropies(grid),
        ),
        geometry=grid.geometry,
    )
    search.run(grid.configurations)
    choice = choose(search.results(grid.configurations), constraints, search.turns)
    rivals = () if choice is None else choice.rivals
    return _Found(
        chosen=None if choice is None else choice.result.configuration,
        undecided_between=tuple(each.configuration for each in rivals if each.is_undecided),
        n_measured=len(search.measurements),
        n_replicates=search.measurements.n_replicates,
    )


def _entropies(grid: RecordedGrid) -> dict[tuple[int, int], dict[str, EntropyBits]]:
    return {
        (each.block_size, each.fetch_factor): {_LABEL: _entropy(bits, grid.random_entropy)}
        for each, bits in zip(grid.configurations, grid.entropies, strict=True)
    }


def _entropy(bits: float, random: float) -> EntropyBits:
    return EntropyBits(
        measured=None,
        expected=Estimate(bits, bits, bits),
        homogeneous=bits,
        lower_bound=0.0,
        upper_bound=random,
        random=random,
    )
