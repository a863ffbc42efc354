"""Which earlier run bears on this one: its configurations are measured first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history._earlier_run import Asked, EarlierRun, Key
from cellfeed_tuner._planning._space import Space

__all__ = ["IGNORED", "NOTHING_KNOWN", "Earlier", "recall"]


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
