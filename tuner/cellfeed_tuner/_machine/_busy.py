"""How much processor time other programs took during a measurement."""

import os
import time
from dataclasses import dataclass

import psutil

from cellfeed.machine import usable_cores
from cellfeed_tuner._constants import LEAST_BUSY_SHARE
from cellfeed_tuner._machine._processes import ProcessorTime

__all__ = ["Busy", "OtherPrograms", "ProcessorClock", "undisturbed_share"]

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as user time already


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    """Processor seconds that programs other than the measured ones took in so many seconds.

    Summed over all processors that this process may run on; in a virtual machine, with the time
    that the host gave to others.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __add__(self, other: "OtherPrograms") -> "OtherPrograms":
        return OtherPrograms(self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """How busy other programs kept the machine while throughput was measured.

    Parameters
    ----------
    other_cores
        How many processors they kept busy, on average.
    share
        The share of this process's usable processors that they took, 0 to 1.
    """

    other_cores: float
    share: float

    @classmethod
    def of(
        cls, others: OtherPrograms, *, n_cores: int | None = None, usable: float | None = None
    ) -> "Busy | None":
        """Return how busy they kept it; None if nothing was measured.

        This process may run on ``n_cores``, and use ``usable`` at a time, which is less under the
        quota of a control group.
        """
        if not others.seconds:
            return None
        n_cores = len(_processors()) if n_cores is None else n_cores
        usable = usable_cores() if usable is None else usable
        other_cores = max(0.0, others.cpu_seconds / others.seconds)
        left = n_cores - other_cores
        return cls(other_cores=other_cores, share=min(max(1 - left / usable, 0.0), 1.0))

    @property
    def sentence(self) -> str:
        """A warning; empty if it does not matter."""
        if self.share < LEAST_BUSY_SHARE:
            return ""
        return (
            f"Other programs took {self.share:.0%} of the processors while throughput was "
            "measured; figures may be too low."
        )


def undisturbed_share(
    seconds: float, processor: ProcessorTime | None, other_cores: float, *, cores: float
) -> float:
    """Return the share of a time that the same work would have taken without other programs.

    While ``p = (running + waiting) / seconds`` threads could run, on average, waiting for a
    processor delayed the work by ``waiting / p``, or by ``waiting`` if p < 1. Threads also wait for
    each other, so that no more counts than other programs took of the processors that the threads
    could have used. What remains is at least the processor time divided by the cores.

    Parameters
    ----------
    seconds
        Duration by the clock.
    processor
        Processor time of all threads meanwhile; None if unknown, so that nothing is corrected.
    other_cores
        Processors that other programs kept busy, on average.
    cores
        Usable processors.

    Examples
    --------
    Two threads on two processors, one of which another program took:

    >>> undisturbed_share(10.0, ProcessorTime(10.0, 10.0), 1.0, cores=2)
    0.5

    A thread that waits for the disk leaves processors to others:

    >>> undisturbed_share(10.0, ProcessorTime(1.0, 0.0), 1.5, cores=2)
    1.0
    """
    if processor is None or seconds <= 0:
        return 1.0
    runnable = max(1.0, (processor.running + processor.waiting) / seconds)
    taken = other_cores * seconds / min(runnable, cores)
    delay = min(processor.waiting / runnable, taken)
    return min(1.0, max(1 - delay / seconds, processor.running / cores / seconds))


class ProcessorClock:
    """Measures the processor time of other programs from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy = _busy_cpu_seconds()
        self._own = time.process_time()

    def others(self, measured_cpu_seconds: float) -> OtherPrograms:
        """Return the time of all programs but this process and the measured ones."""
        own = time.process_time() - self._own + measured_cpu_seconds
        seconds = time.monotonic() - self._began
        return OtherPrograms(seconds, max(0.0, _busy_cpu_seconds() - self._busy - own))


def _busy_cpu_seconds() -> float:
    """Return the busy time of the processors that this process may run on."""
    per_cpu = psutil.cpu_times(percpu=True)
    processors = _processors()
    ours = per_cpu if len(per_cpu) <= max(processors) else [per_cpu[each] for each in processors]
    return float(sum(sum(each) - sum(getattr(each, n, 0.0) for n in _NOT_BUSY) for each in ours))


def _processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))
