"""How many fetches to prefetch from a server, for the chosen configuration."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import LEAST_LIMIT_LEFT, LEAST_TURNS
from cellfeed_tuner._interval import SAME_SPEED_SHARE, is_as_fast
from cellfeed_tuner._measuring._measurement import Measurement, pooled
from cellfeed_tuner._results import PrefetchResult
from cellfeed_tuner._searching._posterior import TurnsOf
from cellfeed_tuner._searching._replicates import Measurements

# Prefetch depths, in fetches, to measure for files on servers. Chosen.
PREFETCHES = (1, 2, 4, 8, 16)
# Rounds in a replicate of a prefetch depth, fewest turns for comparing depths, and most turns.
# Chosen.
DEPTH_ROUNDS, FEWEST_DEPTH_TURNS, MOST_DEPTH_TURNS = 2, 2, 16
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
    _turns: TurnsOf[int] = field(default_factory=TurnsOf[int], init=False)
    _measured: dict[int, list[Measurement]] = field(default_factory=dict, init=False)

    def run(self, depths: Sequence[int]) -> None:
        """Measure in turns, as long as there is time for another one like the longest."""
        rng = np.random.default_rng(self.measurements.seed)
        racing, longest = list(depths), 0.0
        while len(racing) > 1 and len(self._turns) < MOST_DEPTH_TURNS:
            begin = time.monotonic()
            if longest >= self.left():
                return
            speeds = dict[int, float]()
            for depth in rng.permutation(racing).tolist():
                found = self.measurements.timed(
                    self.configuration,
                    prefetch=depth,
                    least_rounds=DEPTH_ROUNDS,
                    limit_seconds=max(LEAST_LIMIT_LEFT, self.left()),
                )
                self.measurements.n_replicates += 1
                self._measured.setdefault(depth, []).append(found)
                if found.round_seconds:
                    speeds[depth] = found.rough_cells_per_second
            if not speeds:
                return
            self._turns.add(speeds)
            longest = max(longest, time.monotonic() - begin)
            if len(self._turns) >= FEWEST_DEPTH_TURNS:
                racing = self._racing(racing)
            if len(self._turns) >= LEAST_TURNS and self._is_decided(racing):
                return

    def best(self) -> int | None:
        """Return the least depth that is at most 2 % and not significantly slower than the fastest.

        None if depths were not compared.
        """
        fitting = [each for each in self._turns.finalists() if self._fits(each)]
        if not fitting or len(self._turns) < FEWEST_DEPTH_TURNS:
            return None
        fastest, *others = fitting
        ratios = {each: self._turns.ratio(each, fastest) for each in others}
        alike = [depth for depth, ratio in ratios.items() if ratio and is_as_fast(ratio)]
        return min([fastest, *alike])

    def results(self) -> tuple[PrefetchResult, ...]:
        """Return the result of each depth, the least first."""
        found = {depth: pooled(each) for depth, each in sorted(self._measured.items())}
        return tuple(
            PrefetchResult(
                prefetch=depth,
                cells_per_second=each.cells_per_second_given(self.measurements.spread),
                n_rounds=len(each.round_seconds),
                n_turns=self._turns.count(depth),
                peak_memory_bytes=each.peak_memory_bytes,
            )
            for depth, each in found.items()
        )

    def memory_of(self, depth: int) -> int:
        """Return the peak memory at a depth."""
        return max(each.peak_memory_bytes for each in self._measured[depth])

    def _fits(self, depth: int) -> bool:
        return self.memory_of(depth) <= self.memory_bytes

    def _racing(self, depths: Sequence[int]) -> list[int]:
        """Return the depths that may still be the fastest."""
        fitting = [each for each in self._turns.finalists() if each in depths and self._fits(each)]
        ratios = {each: self._turns.ratio(each, fitting[0]) for each in fitting[1:]}
        slower = {d for d, ratio in ratios.items() if ratio and ratio.high < 1 - SAME_SPEED_SHARE}
        return [each for each in fitting if each not in slower]

    def _is_decided(self, depths: Sequence[int]) -> bool:
        """Return whether all depths in the race are known to be equally fast."""
        ratios = [self._turns.ratio(each, depths[0]) for each in depths[1:]]
        return all(each is not None and each.low >= 1 - SAME_SPEED_SHARE for each in ratios)
