"""The constraints of a search, and what it recommends."""

from dataclasses import dataclass
from typing import Literal

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate

__all__ = [
    "SAME_ENTROPY_SHARE", "SAME_SPEED_SHARE", "Basis", "Constraints", "Nearest",
    "PrefetchResult", "Recommended", "Rival", "Waiting", "is_undecided", "least_share",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """Throughput of the recommended configuration at one prefetch depth.

    Parameters
    ----------
    prefetch
        Fetches read ahead; see `cellfeed.CellDataset`.
    cells_per_second
        Throughput with its 95 % interval; None if there were too few rounds.
    n_rounds, n_turns
        Rounds of whole fetches that were timed, and over how many measurements, which were
        interleaved with those of other depths.
    peak_memory_bytes
        Peak memory of the process and its workers.
    """

    prefetch: int
    cells_per_second: Estimate | None
    n_rounds: int
    n_turns: int
    peak_memory_bytes: int


SAME_ENTROPY_SHARE = 0.001
"""Shares of random sampling's entropy that differ by less than this count as equal: a replay of
the plan is no more exact."""

SAME_SPEED_SHARE = 0.02
"""A throughput more than this share below the highest is slower, however wide the intervals."""


Basis = Literal["compared", "measured", "predicted"]
"""What a recommendation rests on: on a comparison in turns, on measurements of the configuration
that were not compared with others in turns, or on a prediction."""


def is_undecided(ratio: Estimate) -> bool:
    """Return whether it is open which throughput of a ratio is higher, and whether they differ."""
    same = ratio.low >= 1 - SAME_SPEED_SHARE and ratio.high <= 1 + SAME_SPEED_SHARE
    return ratio.low <= 1 <= ratio.high and not same


def least_share(entropy_floor: float) -> float:
    """Return the lowest share of random sampling's entropy that counts as reaching the floor."""
    return entropy_floor - SAME_ENTROPY_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a configuration must meet to be recommended.

    Parameters
    ----------
    entropy_floor
        Minimum entropy, as a share of that of true random sampling; missing it by less than
        0.001 counts as reaching it.
    memory_bytes
        Memory limit of the process and its workers.
    need_cells_per_second
        Throughput that suffices; None to maximise it.
    step_seconds
        Time of a training step, if the need comes from one. If no configuration keeps up, the
        fastest is recommended nonetheless.
    """

    entropy_floor: float
    memory_bytes: int
    need_cells_per_second: float | None
    step_seconds: float | None = None

    def mixes(self, share_of_random: float) -> bool:
        """Return whether a share of random sampling's entropy reaches the floor."""
        return share_of_random >= least_share(self.entropy_floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Share of its time that training waits for minibatches.

    Parameters
    ----------
    share
        0 to 1, measured with a loop that computes for as long as a training step takes; None if
        there was no time to measure it. The interval of a single round is infinite.
    n_rounds
        Rounds of whole fetches that were timed.
    expected_share
        The share estimated from throughput alone.
    """

    share: Estimate | None
    n_rounds: int
    expected_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A configuration whose measurements were interleaved with those of the recommended one.

    Parameters
    ----------
    configuration
        Its settings.
    ratio
        Throughput of the recommended configuration divided by its own, with the 95 % interval.
    n_turns
        How often both were measured, one right after the other.
    """

    configuration: Configuration
    ratio: Estimate
    n_turns: int

    @property
    def is_undecided(self) -> bool:
        """Whether the measurements show neither which is faster nor that both are equal."""
        return is_undecided(self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """The recommended configuration.

    Parameters
    ----------
    configuration
        The settings.
    basis
        What the choice rests on. "compared": measured in turns with its rivals. "measured": on its
        own, because time ran out, nothing else is feasible, or a throughput is needed. "predicted":
        the likeliest to be the fastest that there was no time to measure.
    cells_per_second
        Throughput with its 95 % interval, by this clock and under the load of other programs; from
        measurements interleaved with those of its rivals if it was compared, or predicted. None if
        nothing was measured.
    peak_memory_bytes
        Peak memory of the process and its workers; None if it was not measured.
    reason
        Why it is recommended, in one sentence.
    waiting
        How long training waits for it; None unless a training step was given.
    rivals
        Configurations that it was compared with, the fastest first.
    start_seconds
        Seconds that its throughput leaves out: at the start of each epoch with worker processes;
        otherwise once in a process, whose memory is new then.
    longest_seconds
        How long it was measured without a break, at most.
    prefetch
        For files on servers, how many fetches to read ahead; None if that was not measured. The
        throughput is at the default depth of `cellfeed.CellDataset`; for other depths see
        `AutotuneResult.prefetch_results`.
    """

    configuration: Configuration
    basis: Basis
    cells_per_second: Estimate | None
    peak_memory_bytes: int | None
    reason: str
    waiting: Waiting | None = None
    rivals: tuple[Rival, ...] = ()
    prefetch: int | None = None
    start_seconds: float = 0.0
    longest_seconds: float = 0.0

    @property
    def settings(self) -> str:
        """All settings in words."""
        ahead = "" if self.prefetch is None else f", prefetch {self.prefetch}"
        return f"{self.configuration}{ahead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The configuration closest to being feasible, where none is.

    Parameters
    ----------
    configuration
        The settings.
    problem
        Which constraints it violates, in one clause.
    """

    configuration: Configuration
    problem: str
