"""What was asked for, and the answer."""

from dataclasses import dataclass

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate

__all__ = [
    "SAME_ENTROPY_SHARE", "SAME_SPEED_SHARE", "Constraints", "Nearest", "PrefetchResult",
    "Recommended", "Rival", "Waiting", "least_share",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """What was measured of the chosen configuration with so many fetches read ahead.

    Parameters
    ----------
    prefetch
        As of `cellfeed.CellDataset`.
    cells_per_second
        Throughput, with its 95 % interval; None if there were too few rounds.
    n_rounds, n_turns
        Rounds of whole fetches that were timed, in so many turns with other depths.
    peak_memory_bytes
        Highest memory of the process and its workers.
    """

    prefetch: int
    cells_per_second: Estimate | None
    n_rounds: int
    n_turns: int
    peak_memory_bytes: int


SAME_ENTROPY_SHARE = 0.001
"""Shares of random sampling's entropy that differ by less than this are the same: a replay of the
plan is not more exact."""

SAME_SPEED_SHARE = 0.02
"""A throughput that is lower than the highest by more than this share is not as fast, however wide
the intervals."""


def least_share(entropy_floor: float) -> float:
    """Return the least share of random sampling's entropy that counts as reaching the floor."""
    return entropy_floor - SAME_ENTROPY_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a configuration must meet to be recommended.

    Parameters
    ----------
    entropy_floor
        Least entropy, as a share of true random sampling's; what misses it by less than
        `SAME_ENTROPY_SHARE` reaches it.
    memory_bytes
        Most memory of the process and its workers.
    need_cells_per_second
        Throughput that suffices; None for the most there is.
    step_seconds
        How long training computes on a minibatch, if that is where the need comes from: then it
        is missed rather than nothing recommended.
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
    """How much of its time training waits for minibatches.

    Parameters
    ----------
    share
        0 to 1, measured with a loop that computes for as long as a step takes; None if there was
        no time for that. Its interval is infinite for a single round.
    n_rounds
        Rounds of whole fetches that it rests on.
    expected_share
        What throughput alone lets one expect.
    """

    share: Estimate | None
    n_rounds: int
    expected_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What the choice was measured in turns with.

    Parameters
    ----------
    configuration
        Its settings.
    ratio
        How many times as fast the choice is, with its 95 % interval.
    n_turns
        In how many turns both were measured, one right after the other.
    """

    configuration: Configuration
    ratio: Estimate
    n_turns: int

    @property
    def is_undecided(self) -> bool:
        """Whether the turns do not tell which is faster, nor that both are the same."""
        same = self.ratio.low >= 1 - SAME_SPEED_SHARE and self.ratio.high <= 1 + SAME_SPEED_SHARE
        return self.ratio.low <= 1 <= self.ratio.high and not same


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """The choice.

    Parameters
    ----------
    configuration
        The settings.
    cells_per_second
        Throughput measured in turns with what else might have been chosen, after that was clear;
        that of the search if time ran out.
    measured_in_turns
        Which of the two it is.
    peak_memory_bytes
        Highest memory of the process and its workers.
    reason
        Why, in one sentence.
    waiting
        Whether training waits for it; None unless a training step was given.
    rivals
        What it was measured in turns with, the fastest first.
    prefetch
        Fetches to read ahead, of files on servers; None if that was not measured. Throughput is
        that of what `cellfeed.CellDataset` reads ahead by itself; see
        `AutotuneResult.prefetch_results`.
    """

    configuration: Configuration
    cells_per_second: Estimate
    measured_in_turns: bool
    peak_memory_bytes: int
    reason: str
    waiting: Waiting | None = None
    rivals: tuple[Rival, ...] = ()
    prefetch: int | None = None

    @property
    def settings(self) -> str:
        """All of them in words."""
        ahead = "" if self.prefetch is None else f", prefetch {self.prefetch}"
        return f"{self.configuration}{ahead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The configuration that comes nearest where none is feasible.

    Parameters
    ----------
    configuration
        The settings.
    problem
        What it lacks, in one clause.
    """

    configuration: Configuration
    problem: str
