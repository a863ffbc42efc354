"""Measuring in this process, briefly: whole runs in less than a second, for what results say.

What only a process of its own can do (being killed, hanging, its memory) is in `test_measure`.
"""

from collections.abc import Callable
from typing import Any, Self

import pytest
from tests import short_replicates

from cellfeed import CellfeedError
from cellfeed_tuner._measuring._process import MeasuringProcess, Outcome, Request

__all__ = ["MeasuringHere", "MeasuringProcess", "events_of", "measure_here"]

MODULES = ("_autotune", "_measuring._measurement", "_measuring._process", "_profile")


def events_of(request: Request, subject: Any) -> list[Any]:
    """What a request reports, but for the numbers of minibatches."""
    events = list[Any]()
    request.run(subject, lambda each: None if isinstance(each, int) else events.append(each))
    return events


class MeasuringHere:
    """Stands in for a measuring process."""

    def __init__(self, subject: Any = None) -> None:
        self.subject = subject

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def memory_bytes(self) -> int:
        return 10**8

    def run(self, request: Request, *, limit_seconds: float) -> Outcome:
        failure, events = None, list[Any]()
        try:
            events = events_of(request, self.subject)
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - as a child reports any
            failure = str(error) or repr(error)
        return Outcome(events=tuple(events), peak_memory_bytes=10**8, failure=failure)


def measure_here(patch: pytest.MonkeyPatch) -> None:
    """Let `autotune` and `measure` time in this process, for a hundredth of a second each."""
    patch.setattr(short_replicates, "SECONDS", 0.01)
    set_attribute: Callable[[Any, str, Any], None] = patch.setattr
    short_replicates.shorten(set_attribute)
    for module in MODULES:
        patch.setattr(f"cellfeed_tuner.{module}.MeasuringProcess", MeasuringHere)
