"""What one run of ``autotune`` leaves for later ones."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._history._digest import Fingerprint
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._planning._space import Space
from cellfeed_tuner._ranks import Ranks

__all__ = ["Asked", "EarlierRun", "Key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What results belong to."""

    data: Fingerprint
    machine: Fingerprint
    versions: Fingerprint

    @property
    def name(self) -> str:
        """The three digests, that of the data first."""
        return f"{self.data.digest}-{self.machine.digest}-{self.versions.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run was asked for.

    Parameters
    ----------
    label, further_labels
        The first obs column that minibatches are mixed by, and the others.
    batch_size, budget, entropy_floor, block_sizes, fetch_factors, workers
        As in `autotune`.
    cache
        State of the page cache that was found.
    others
        What other settings may be, by name.
    n_ranks, world_size
        Ranks that were measured side by side, and all that divide an epoch.
    """

    label: str
    batch_size: int
    cache: str
    budget: float
    entropy_floor: float
    block_sizes: Sequence[int]
    fetch_factors: Sequence[int]
    workers: Sequence[int]
    further_labels: tuple[str, ...] = ()
    others: Mapping[str, Sequence[Setting]] = field(default_factory=dict)
    n_ranks: int = 1
    world_size: int = 1

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, the first one first."""
        return self.label, *self.further_labels

    @property
    def ranks(self) -> Ranks:
        """How many ranks the choice was for."""
        return Ranks(n_local=self.n_ranks, n_total=self.world_size)

    @property
    def space(self) -> Space:
        """What may be chosen."""
        return Space.of(self.block_sizes, self.fetch_factors, self.workers, **self.others)

    def is_like(self, other: "Asked") -> bool:
        """Return whether both measure the same thing."""
        mine, theirs = ((each.batch_size, each.cache, each.ranks) for each in (self, other))
        return mine == theirs

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a range is its start, stop and step."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Asked":
        """Return what `to_json` and JSON have made plain."""
        known = {"world_size": plain.get("n_ranks", 1), **plain}
        return cls(**{name: _sizes_or(value) for name, value in known.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """One run, which ``began`` at a time in UTC, ISO 8601, and what it measured.

    Parameters
    ----------
    path
        The first of the files, so that people know them again.
    choice, cells_per_second
        What it recommended, and the throughput that it published; None if nothing.
    trials
        Seconds per cell of each replicate of each configuration, none of one that failed.
    raced
        Those that may have been the best to the end.
    """

    key: Key
    asked: Asked
    began: str
    path: str
    choice: Configuration | None
    cells_per_second: Estimate | None
    trials: Mapping[Configuration, Sequence[float]] = field(default_factory=dict)
    raced: Collection[Configuration] = frozenset()

    def seconds_per_cell(self) -> dict[Configuration, float]:
        """Return the mean of the replicates of each configuration that did not fail."""
        return {each: float(np.mean(found)) for each, found in self.trials.items() if found}

    @property
    def date(self) -> str:
        """The day, such as 2026-11-21."""
        return self.began[:10]

    def to_json(self) -> dict[str, Any]:
        """Return all but the key and the trials as plain values."""
        return {
            "asked": self.asked.to_json(),
            "began": self.began,
            "path": self.path,
            "choice": self.choice and dict(self.choice),
            "cells_per_second": self.cells_per_second and asdict(self.cells_per_second),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], **others: Any) -> "EarlierRun":
        """Return a run of which `to_json` has made plain values; ``others`` are the rest."""
        choice, speed = plain["choice"], plain["cells_per_second"]
        return cls(
            asked=Asked.from_json(plain["asked"]),
            began=plain["began"],
            path=plain["path"],
            choice=choice and Configuration(**choice),
            cells_per_second=speed and Estimate(**speed),
            **others,
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, range):
        return {"start": value.start, "stop": value.stop, "step": value.step}
    return value


def _sizes_or(value: Any) -> Any:
    if isinstance(value, Mapping) and value.keys() == {"start", "stop", "step"}:
        return range(value["start"], value["stop"], value["step"])
    if isinstance(value, Mapping):
        return {name: _sizes_or(each) for name, each in value.items()}
    return tuple(value) if isinstance(value, list) else value
