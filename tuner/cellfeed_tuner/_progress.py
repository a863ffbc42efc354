"""Telling how far the work has come, and how the race stands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate

__all__ = [
    "Progress",
    "RaceState",
    "RaceWatcher",
    "Standing",
    "Standings",
    "silent",
    "unwatched",
]

RaceState = Literal[
    "racing",  # may still be the best
    "left",  # cannot be the best, or is not feasible
    "below floor",  # mixes too little to be chosen
]


class Progress(Protocol):
    """Who is told how far the work has come."""

    def __call__(self, stage: str, done: float, total: float) -> object:
        """Be told that ``done`` of ``total`` of a stage is done."""


def silent(stage: str, done: float, total: float) -> None:
    """Tell nobody."""
    del stage, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How one configuration stands in the race.

    Parameters
    ----------
    configuration
        The settings.
    state
        Whether it may still be the best.
    n_rounds
        Rounds of whole fetches that were timed.
    cells_per_second
        Throughput so far, with its 95 % interval; None while there are too few rounds for one.
    rough_cells_per_second
        Throughput from however little there is; 0 if there is nothing.
    """

    configuration: Configuration
    state: RaceState
    n_rounds: int
    cells_per_second: Estimate | None
    rough_cells_per_second: float


Standings = Callable[[], Sequence[Standing]]
"""Says how everything that was measured stands by now."""


class RaceWatcher(Protocol):
    """Who is handed what says how the race stands, before it begins."""

    def __call__(self, standings: Standings) -> object:
        """Take it, and ask it at any time that nothing is being timed: at `Progress`."""


def unwatched(standings: Standings) -> None:
    """Leave the race to itself."""
    del standings
