"""How many fetches to prefetch from a server, for the chosen configuration."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from cellfeed_tuner._choose import fastest
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import LEAST_LIMIT_LEFT, LEAST_TURNS
from cellfeed_tuner._interval import SAME_SPEED_SHARE, Estimate, is_as_fast
from cellfeed_tuner._measuring._measurement import Measurement, pooled
from cellfeed_tuner._results import PrefetchResult
from cellfeed_tuner._searching._model import Model, Replicate
from cellfeed_tuner._searching._replicates import Measurements

# Prefetch depths, in fetches, to measure for files on servers. Chosen.
PREFETCHES = (1, 2, 4, 8, 16)
# Rounds in a replicate of a prefetch depth, fewest turns for comparing depths, and most turns.
# Chosen.
DEPTH_ROUNDS, FEWEST_DEPTH_TURNS, MOST_DEPTH_TURNS = 2, 2, 16
# A depth that was in fewer turns than this share of the most has left the race. Chosen.
FINALIST_SHARE = 0.5
# Most bytes in flight from a server. Source: `cellfeed.CellDataset`.
MOST_BYTES_PREFETCHED = 256 << 20


def depths_to_measure(
    *, n_fetches: int, fetch_bytes: float, memory_bytes: float, depths: Sequence[int] = PREFETCHES
) -> list[int]:
    """Return the depths, ascending, that differ in effect and fit in memory; always the first.

    Parameters
    ----------
    n_fetches, fetch_bytes
        Fetches that one process reads in an epoch, and the stored bytes of one.
    memory_bytes
        Most bytes to prefetch.

    Examples
    --------
    >>> depths_to_measure(n_fetches=100, fetch_bytes=1e6, memory_bytes=1e10)
    [1, 2, 4, 8, 16]
    >>> depths_to_measure(n_fetches=4, fetch_bytes=1e6, memory_bytes=1e10)
    [1, 2, 4]
    >>> depths_to_measure(n_fetches=100, fetch_bytes=100e6, memory_bytes=1e10)
    [1, 2, 4]
    >>> depths_to_measure(n_fetches=100, fetch_bytes=1e6, memory_bytes=3e6)
    [1, 2]
    """
    before = [0, *depths]
    return [
        depth
        for less, depth in zip(before, depths, strict=False)
        # A depth that a smaller one reaches as well is no other depth.
        if less == 0
        or (
            less < n_fetches - 1
            and less * fetch_bytes < MOST_BYTES_PREFETCHED
            and depth * fetch_bytes <= memory_bytes
        )
    ]


@dataclass(slots=True, kw_only=True)
class PrefetchSearch:
    """Measures one configuration at several depths, in turns, until the best is clear.

    ``left`` returns the seconds that are left for that.
    """

    measurements: Measurements
    configuration: Configuration
    memory_bytes: int
    left: Callable[[], float]
    _n_turns: int = field(default=0, init=False)
    _measured: dict[int, list[Measurement]] = field(default_factory=dict, init=False)
    _replicates: dict[int, list[Replicate]] = field(default_factory=dict, init=False)
    _model: Model = field(init=False)

    def run(self, depths: Sequence[int]) -> None:
        """Measure in turns, as long as there is time for another one like the longest."""
        settings = list(map(self._at, depths))
        self._model = Model(settings, settings, goal_of=lambda _: fastest)
        rng = np.random.default_rng(self.measurements.seed)
        racing, longest = list(depths), 0.0
        while len(racing) > 1 and self._n_turns < MOST_DEPTH_TURNS:
            begin = time.monotonic()
            if longest >= self.left():
                return
            for depth in rng.permutation(racing).tolist():
                self._measure(depth)
            if not self._replicates:
                return
            self._n_turns += 1
            longest = max(longest, time.monotonic() - begin)
            if self._n_turns >= FEWEST_DEPTH_TURNS:
                racing = self._racing(racing)
            if self._n_turns >= LEAST_TURNS and self._is_decided(racing):
                return

    def _at(self, depth: int) -> Configuration:
        return self.configuration.changed(prefetch=depth)

    def _measure(self, depth: int) -> None:
        found = self.measurements.timed(
            self.configuration,
            prefetch=depth,
            least_rounds=DEPTH_ROUNDS,
            limit_seconds=max(LEAST_LIMIT_LEFT, self.left()),
        )
        self.measurements.n_replicates += 1
        self._measured.setdefault(depth, []).append(found)
        if found.round_seconds:
            own = self._replicates.setdefault(depth, [])
            own.append(Replicate(1 / found.rough_cells_per_second, self._n_turns))
            self._model.tell(self._at(depth), own)

    def best(self) -> int | None:
        """Return the least depth that is at most 2 % and not significantly slower than the fastest.

        None if depths were not compared.
        """
        fitting = self._fastest_first(
            [each for each in self._replicates if self._is_finalist(each)]
        )
        if not fitting or self._n_turns < FEWEST_DEPTH_TURNS:
            return None
        first, *others = fitting
        return min([first, *(each for each in others if is_as_fast(self._ratio(each, first)))])

    def results(self) -> tuple[PrefetchResult, ...]:
        """Return the result of each depth, the least first."""
        found = {depth: pooled(each) for depth, each in sorted(self._measured.items())}
        return tuple(
            PrefetchResult(
                prefetch=depth,
                cells_per_second=self._model.speed(self._at(depth)),
                n_rounds=len(each.round_seconds),
                n_turns=len(self._replicates.get(depth, ())),
                peak_memory_bytes=each.peak_memory_bytes,
            )
            for depth, each in found.items()
        )

    def memory_of(self, depth: int) -> int:
        """Return the peak memory at a depth."""
        return max(each.peak_memory_bytes for each in self._measured[depth])

    def _is_finalist(self, depth: int) -> bool:
        """Return whether a depth fits in memory, and was in the race for long."""
        most = max(map(len, self._replicates.values()))
        is_often = len(self._replicates[depth]) >= FINALIST_SHARE * most
        return is_often and self.memory_of(depth) <= self.memory_bytes

    def _fastest_first(self, depths: Sequence[int]) -> list[int]:
        costs = self._model.seconds_per_cell()
        return sorted(depths, key=lambda each: costs[self._at(each)])

    def _ratio(self, depth: int, other: int) -> Estimate:
        """Return one throughput divided by another; both are measured."""
        found = self._model.ratio(self._at(depth), self._at(other))
        return cast("Estimate", found)

    def _racing(self, depths: Sequence[int]) -> list[int]:
        """Return the depths that may still be the fastest."""
        timed = [each for each in depths if each in self._replicates and self._is_finalist(each)]
        fitting = self._fastest_first(timed)
        least = 1 - SAME_SPEED_SHARE
        return [each for each in fitting if self._ratio(each, fitting[0]).high >= least]

    def _is_decided(self, depths: Sequence[int]) -> bool:
        """Return whether all depths in the race are known to be equally fast."""
        least = 1 - SAME_SPEED_SHARE
        return all(self._ratio(each, depths[0]).low >= least for each in depths[1:])
