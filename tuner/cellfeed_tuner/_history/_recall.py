"""What earlier runs are worth to this one: what they found is looked at first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history._earlier_run import Asked, EarlierRun, Key
from cellfeed_tuner._planning._space import Space

__all__ = ["NOTHING_KNOWN", "Earlier", "EarlierUse", "Recollection"]

EarlierUse = Literal[
    "none",  # nothing was known, or it was to be ignored
    "order",  # something was known, by which the first looks were chosen
    "confirmed",  # of version 0.1.0: it was measured again in part, so the search was a short one
    "dropped",  # of version 0.1.0: it was not as before, so the search was a full one
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What became of earlier runs' results.

    Parameters
    ----------
    use
        "none": there were none, or they were ignored. "order": they chose what is looked at first.
        "confirmed" and "dropped" are of results of version 0.1.0.
    sentence
        The same in words.
    """

    use: EarlierUse
    sentence: str


NOTHING_KNOWN = Earlier(use="none", sentence="There is no earlier result for these files.")
_IGNORED = Earlier(use="none", sentence="Earlier results were ignored, as asked.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recollection:
    """Which earlier run on the same data bears on a search, if any, and what to say of it."""

    run: EarlierRun | None = None
    said: Earlier = NOTHING_KNOWN

    @classmethod
    def of(cls, runs: Sequence[EarlierRun], key: Key, asked: Asked) -> "Recollection":
        """Choose the last of the same machine and versions, or else of any."""
        alike = [
            run
            for run in runs
            if run.key.data == key.data
            and run.asked.is_like(asked)
            and any(each in asked.space for each in run.trials)
        ]
        if not alike:
            return cls()
        run = max(alike, key=lambda each: (each.key == key, each.began))
        return cls(run=run, said=_said_of(run, key))

    @classmethod
    def ignored(cls) -> "Recollection":
        """Return one that knows nothing, as was asked."""
        return cls(said=_IGNORED)

    def trials_in(self, space: Space) -> list[Configuration]:
        """Return what of a space the run has measured: its choice first, then the fastest."""
        if self.run is None:
            return []
        costs, choice = self.run.seconds_per_cell(), self.run.choice
        found = sorted(costs, key=lambda each: (each != choice, costs[each]))
        return [each for each in found if each in space]


def _said_of(run: EarlierRun, key: Key) -> Earlier:
    if run.key.machine != key.machine:
        whose = f"Another machine's result ({run.key.machine.facts.get('cpu') or 'unknown'})"
    elif run.key.versions != key.versions:
        whose = "A result of this machine with other versions"
    else:
        whose = "A result of this machine"
    sentence = f"{whose} of {run.date} decided what was measured first, and nothing else."
    return Earlier(use="order", sentence=sentence)
