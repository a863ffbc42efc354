"""What earlier runs found, kept by fingerprints, and what it is worth today."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._planning._cost_model import Space
from cellfeed_tuner._ranks import Ranks

# What one run of ``autotune`` leaves for later ones, and the fingerprints it is kept under.

_DIGEST_BYTES = 4


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest of eight hexadecimal digits, and the plain values that it identifies."""

    digest: str
    facts: Mapping[str, Any] = field(compare=False)


def fingerprint(facts: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of plain values.

    Examples
    --------
    >>> len(fingerprint({"cores": 2, "kernel": "Linux 6"}).digest)
    8
    """
    return Fingerprint(digest(json.dumps(facts, sort_keys=True).encode()), dict(facts))


def digest(content: bytes) -> str:
    """Return eight hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


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
    """What a run measured: ``cache`` is the state of the page cache that was found."""

    labels: Sequence[str]
    batch_size: int
    cache: str
    ranks: Ranks = field(default_factory=Ranks)

    def is_like(self, other: "Asked") -> bool:
        """Return whether both runs measure the same thing; labels do not matter to throughput."""
        mine, theirs = ((each.batch_size, each.cache, each.ranks) for each in (self, other))
        return mine == theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """One run, and what it measured.

    Parameters
    ----------
    began
        When, in UTC, ISO 8601.
    path
        The first of the files, by which people recognize the collection.
    choice, cells_per_second
        The recommendation and its throughput; None if there was none.
    trials
        Seconds per cell of each replicate of each configuration that did not fail.
    """

    key: Key
    asked: Asked
    began: str
    path: str
    choice: Configuration | None
    cells_per_second: Estimate | None
    trials: Mapping[Configuration, Sequence[float]] = field(default_factory=dict)

    @property
    def date(self) -> str:
        """The day, such as 2026-11-21."""
        return self.began[:10]

    def to_json(self) -> dict[str, Any]:
        """Return all but the key and the trials as plain values."""
        return {
            "asked": asdict(self.asked),
            "began": self.began,
            "path": self.path,
            "choice": self.choice and dict(self.choice),
            "cells_per_second": self.cells_per_second and asdict(self.cells_per_second),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], **others: Any) -> "EarlierRun":
        """Return a run from the plain values of `to_json` and the key and trials."""
        asked, choice, speed = plain["asked"], plain["choice"], plain["cells_per_second"]
        return cls(
            asked=Asked(**{**asked, "ranks": Ranks(**asked["ranks"])}),
            began=plain["began"],
            path=plain["path"],
            choice=choice and Configuration(**choice),
            cells_per_second=speed and Estimate(**speed),
            **others,
        )


# Which earlier run bears on this one: its configurations are measured first.


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """Whether an earlier run was used.

    Parameters
    ----------
    use
        "order" if it decided what was measured first; "none" if there was none, or it was ignored.
    sentence
        The same in words.
    """

    use: Literal["none", "order"]
    sentence: str


NOTHING_KNOWN = Earlier(use="none", sentence="There is no earlier result for these files.")
IGNORED = Earlier(use="none", sentence="Earlier results were ignored, as requested.")


def recall(
    runs: Sequence[EarlierRun], key: Key, asked: Asked, space: Space
) -> tuple[list[Configuration], Earlier]:
    """Return the configurations of a space that an earlier run measured, and which run that was.

    The last run of the same machine and versions counts, or else the last of any. Its choice comes
    first, then the fastest.
    """
    alike = [
        run
        for run in runs
        if run.key.data == key.data
        and run.asked.is_like(asked)
        and any(each in space for each in run.trials)
    ]
    if not alike:
        return [], NOTHING_KNOWN
    run = max(alike, key=lambda each: (each.key == key, each.began))
    costs = {each: np.mean(found) for each, found in run.trials.items() if each in space}
    return sorted(costs, key=lambda each: (each != run.choice, costs[each])), _used(run, key)


def _used(run: EarlierRun, key: Key) -> Earlier:
    if run.key.machine != key.machine:
        whose = f"another machine's result ({run.key.machine.facts.get('cpu') or 'unknown'})"
    elif run.key.versions != key.versions:
        whose = "a result of this machine with other versions"
    else:
        whose = "a result of this machine"
    sentence = f"The order of the first measurements follows {whose} of {run.date}."
    return Earlier(use="order", sentence=sentence)
