"""Replay the search on a recorded grid many times, and report how good its choices are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from bench.backtest.recorded_grid import RecordedGrid, RecordedProcess

from cellfeed_tuner._choose import Choice, Requirements
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate, is_undecided
from cellfeed_tuner._results import MUCH_CHANCE, Constraints, EntropyBits
from cellfeed_tuner._searching._replicates import Measurements
from cellfeed_tuner._searching._search import Search
from cellfeed_tuner._time_budget import TimeBudget

# What `autotune` has for its search by default: 60 seconds, without its start, looking for the
# bottleneck, and writing.
DEFAULT_SECONDS = 44.0
GOOD_REGRET = 0.05
"""A choice that is slower than the best by at most this share is a good one."""
_LABEL = "label"
_N_BEST = 6
# Cells per second of one of which no round ended in time.
_TOO_SLOW = 1.0

Baseline = Callable[[Measurements, Sequence[Configuration], int], Configuration]
"""Measures some of the candidates until the budget is spent, and returns its choice."""


def six_largest(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure the six with the largest fetches and blocks in turns, without workers."""
    alone = [each for each in candidates if each.num_workers == 0]
    racing, rng = alone or list(candidates), np.random.default_rng(seed)
    racing.sort(key=lambda each: (each.fetch_factor * each.block_size, each.fetch_factor))
    racing = racing[-_N_BEST:]
    while measurements.budget.left > 0:
        rng.shuffle(racing)
        _measure(measurements, racing)
    return _fastest(measurements)


def at_random(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Measure random configurations until the budget is spent."""
    rng = np.random.default_rng(seed)
    while measurements.budget.left > 0:
        _measure(measurements, [candidates[int(rng.integers(len(candidates)))]])
    return _fastest(measurements)


def oracle(
    measurements: Measurements, candidates: Sequence[Configuration], seed: int
) -> Configuration:
    """Tell the six fastest apart, given their throughputs and the noise of measurements.

    Only their order is unknown: all permutations are equally likely at first, and each measurement
    reweights them by its likelihood. Measure next whichever of the two likeliest good choices has
    fewer measurements; choose the likeliest in the end.
    """
    process, rng = measurements.process, np.random.default_rng(seed)
    assert isinstance(process, RecordedProcess)
    costs = process.seconds_per_cell()
    best = sorted(candidates, key=costs.__getitem__)[:_N_BEST]
    logs = np.log([costs[each] for each in best])
    orders = np.array(list(permutations(range(len(best)))))
    is_good = (logs <= logs[0] - np.log(1 - GOOD_REGRET))[orders]
    log_likelihood, n_looks = np.zeros(len(orders)), np.zeros(len(best))
    rng.shuffle(best)
    while True:
        weights = np.exp(log_likelihood - log_likelihood.max())
        # Ties come in random order.
        order: list[int] = np.lexsort((rng.random(len(best)), -(weights @ is_good))).tolist()
        if measurements.budget.left <= 0:
            return best[order[0]]
        place = min(order[:2], key=n_looks.__getitem__)
        speed = measurements.take(best[place]).rough_cells_per_second or _TOO_SLOW
        n_looks[place] += 1
        errors = (-np.log(speed) - logs[orders[:, place]]) / max(process.spread, 1e-3)
        log_likelihood = log_likelihood - errors**2 / 2


BASELINES: dict[str, Baseline] = {
    "six largest": six_largest,
    "random": at_random,
    "six known": oracle,
}
"""All, by name."""


def _measure(measurements: Measurements, configurations: Sequence[Configuration]) -> None:
    for each in configurations:
        if measurements.budget.left > 0:
            measurements.take(each)


def _fastest(measurements: Measurements) -> Configuration:
    """Return the configuration with the least mean seconds per cell, of those that did not fail."""
    costs = {
        each: float(np.mean([one.seconds_per_cell for one in found]))
        for each in measurements
        if (found := measurements.replicates(each))
    }
    return min(costs, key=costs.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How well the search did at one entropy floor.

    Parameters
    ----------
    floor
        Least entropy, as a share of true random sampling's.
    spread
        Relative spread of replicates in the replay.
    n_configurations, n_feasible
        Size of the grid, and how many of its configurations mix well enough.
    best
        The fastest feasible configuration; None if there is none.
    best_cells_per_second
        Its recorded throughput.
    chosen
        The search's choice with each seed; None if it made none.
    regrets
        By which share of the best the choice is slower, with each seed; 1 if there is none.
    undecided
        Whether it reported, with each seed, being undecided between its choice and a configuration
        that is at most 5 % slower than the best, or any that was not measured.
    shares_measured
        Share of the grid that was measured, with each seed.
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
    baseline_regrets: Mapping[str, tuple[float, ...]]

    def share_within(self, baseline: str | None = None) -> float:
        """Return the share of searches whose choice is at most 5 % slower than the best.

        For the search of `autotune`, or for a simpler one.
        """
        regrets = self.regrets if baseline is None else self.baseline_regrets[baseline]
        return sum(each <= GOOD_REGRET for each in regrets) / max(1, len(regrets))


def replay(
    grid: RecordedGrid,
    *,
    floors: Sequence[float] = (0.9, 0.95, 0.99),
    seconds: float = DEFAULT_SECONDS,
    n_seeds: int = 100,
    spread: float | None = None,
    baselines: Sequence[str] = (),
) -> list[Replay]:
    """Search a recorded grid many times, and compare the choices with the best.

    This is the search that runs on a disk, with the rule by which it chooses; only the errors of
    measurements are simulated. Configurations that mix too little are known beforehand, and never
    measured.

    Parameters
    ----------
    grid
        The recording.
    floors
        Least entropies, as shares of true random sampling's.
    seconds
        How long each search measures.
    n_seeds
        How many searches to run at each floor.
    spread
        Relative spread of measurements; if None, that of the grid's runs, or 5 % if there is
        only one run.
    baselines
        Simpler searches to compare with, with as much time, by their names in `BASELINES`.
    """
    spread = grid.replicate_spread() if spread is None else spread
    return [_replay_at(grid, floor, seconds, n_seeds, spread, baselines) for floor in floors]


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

    def regret(chosen: Configuration | None) -> float:
        return 1.0 if chosen is None or best is None else 1 - speeds[chosen] / speeds[best]

    def measured(seed: int) -> Measurements:
        # Seeded apart from the planner's generator, so that the two are independent.
        rng = np.random.default_rng((seed, 1))
        process = RecordedProcess(grid=grid, spread=spread, rng=rng)
        return Measurements(
            process=process,
            labels=[_LABEL],
            batch_size=grid.batch_size,
            cache="cold",
            seed=seed,
            budget=TimeBudget(seconds, process.clock),
        )

    def leaves_open(choice: Choice | None) -> bool:
        if choice is None:
            return False
        rivals = [each.configuration for each in choice.rivals if is_undecided(each.ratio)]
        may_be_surpassed = (choice.chance_of_faster or 0.0) >= MUCH_CHANCE
        return may_be_surpassed or any(regret(other) <= GOOD_REGRET for other in rivals)

    looks = [measured(seed) for seed in seeds]
    choices = [_search(grid, floor, each) for each in looks]
    chosen = tuple(None if each is None else each.result.configuration for each in choices)
    return Replay(
        floor=floor,
        spread=spread,
        n_configurations=len(grid),
        n_feasible=len(feasible),
        best=best,
        best_cells_per_second=None if best is None else speeds[best],
        chosen=chosen,
        regrets=tuple(map(regret, chosen)),
        undecided=tuple(map(leaves_open, choices)),
        shares_measured=tuple(len(each) / len(grid) for each in looks),
        baseline_regrets={
            name: tuple(regret(BASELINES[name](measured(seed), feasible, seed)) for seed in seeds)
            for name in baselines
        },
    )


def _search(grid: RecordedGrid, floor: float, measurements: Measurements) -> Choice | None:
    constraints = Constraints(
        entropy_floor=floor, memory_bytes=grid.memory_limit, need_cells_per_second=None
    )
    requirements = Requirements(
        n_cells=grid.n_cells,
        row_bytes=1.0,
        batch_size=grid.batch_size,
        constraints=constraints,
        entropies=_entropies(grid).__getitem__,
    )
    search = Search(measurements=measurements, requirements=requirements)
    search.run(grid.configurations)
    return search.choose(search.results(grid.configurations))


def _entropies(grid: RecordedGrid) -> dict[tuple[int, int], dict[str, EntropyBits]]:
    return {
        (each.block_size, each.fetch_factor): {_LABEL: entropy_of(bits, grid.random_entropy)}
        for each, bits in zip(grid.configurations, grid.entropies, strict=True)
    }


def entropy_of(bits: float, random: float) -> EntropyBits:
    """Return what is known of a label before anything is measured."""
    return EntropyBits(
        measured=None,
        expected=Estimate(bits, bits, bits),
        homogeneous=bits,
        lower_bound=0.0,
        upper_bound=random,
        random=random,
    )


def markdown_table(rows: Iterable[Iterable[str]], headings: Sequence[str]) -> str:
    """Return rows as a Markdown table; only these columns have text."""
    texts = {"grid", "best", "machine", "collection", "chosen: block x fetch, workers"}
    aligned = ["---" if each in texts else "---:" for each in headings]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, aligned, *rows))
