"""Timing a configuration in one process for each rank, side by side, as one measurement.

The processes are forked by the one that measures, which does nothing else meanwhile, and so is the
place where their memory and processor time are summed up. They wait for each other at the end of
every round, as ranks do in training: a round takes as long as on the slowest rank, and gives the
cells of all.
"""

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import psutil

from cellfeed import CellfeedError
from cellfeed_tuner._measuring._bytes_read import BytesRead
from cellfeed_tuner._measuring._events import (
    Delivery,
    Entropies,
    Requests,
    Round,
    Sampled,
    Started,
)
from cellfeed_tuner._measuring._killing import ChildKilledError, kill_tree
from cellfeed_tuner._ranks._pace import InStep, Pace, Shared

__all__ = ["run_side_by_side"]

Report = Callable[[object], None]
RunRank = Callable[[int, Pace, Report], None]

# How often to look whether a process was killed whose workers still hold its end of the pipe.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Ended:
    """A process is done; ``error`` is why it could not go on."""

    error: Exception | None = None


def run_side_by_side(run: RunRank, n: int, report: Report) -> None:
    """Run something in as many processes as there are ranks, and report what they do together.

    That is `Started` once, then each `Round`, then what was found at the end.

    Raises
    ------
    CellfeedError, RuntimeError
        What one of them raised, and what else was raised in one.
    ChildKilledError
        One was killed.
    """
    shared, pipes = Shared.by(n), [Pipe(duplex=False) for _ in range(n)]
    own_bytes = _own_bytes()
    pids = [_forked(run, number, InStep(shared, number), pipes) for number in range(n)]
    for _, sender in pipes:
        sender.close()
    together = _Together(n, report, (n - 1) * own_bytes)
    ranks = {receiver: number for number, (receiver, _) in enumerate(pipes)}
    try:
        while ranks:
            ready = wait([*ranks], _LOOK_SECONDS)
            for receiver, number in [*ranks.items()]:
                if receiver in ready and together.took(number, _received(receiver, number)):
                    del ranks[receiver]
                elif receiver not in ready and _has_ended(pids[number]) and not receiver.poll():
                    raise ChildKilledError(_killed(number))
        together.end()
    finally:
        for pid in pids:
            kill_tree(pid)
            os.waitpid(pid, 0)


def _forked(run: RunRank, number: int, pace: Pace, pipes: Sequence[Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # Else nobody would see that one of the others, or who started them, has ended.
    for other, (receiver, sender) in enumerate(pipes):
        receiver.close()
        if other != number:
            sender.close()
    _, sender = pipes[number]
    try:
        run(number, pace, sender.send)
        sender.send(_Ended())
    except threading.BrokenBarrierError:  # another cannot go on, and says why
        sender.send(_Ended())
    except CellfeedError as error:
        pace.leave()
        sender.send(_Ended(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs in the report
        pace.leave()
        sender.send(_Ended(RuntimeError(str(error) or repr(error))))
    finally:
        os._exit(0)


def _received(receiver: "Connection[Any, Any]", number: int) -> object:
    try:
        return receiver.recv()
    except EOFError:
        raise ChildKilledError(_killed(number)) from None


def _killed(number: int) -> str:
    return f"the process of rank {number} was killed, perhaps for want of memory"


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _own_bytes() -> int:
    """Return what each rank holds by itself that processes which are forked here share."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


class _Together:
    """Makes one event of those of all ranks."""

    def __init__(self, n: int, report: Report, unshared_bytes: int) -> None:
        self._report, self._unshared_bytes = report, unshared_bytes
        self._events = defaultdict[type, list[deque[Any]]](lambda: [deque() for _ in range(n)])

    def took(self, number: int, event: object) -> bool:
        """Take an event of a rank; return whether it was its last one."""
        if isinstance(event, _Ended):
            if event.error is not None:
                raise event.error
            return True
        of_kind = self._events[type(event)]
        of_kind[number].append(event)
        if isinstance(event, Started | Round) and all(of_kind):
            events = [each.popleft() for each in of_kind]
            if isinstance(event, Started):
                self._report(_started(events, self._unshared_bytes))
            else:
                self._report(_round(events))
        return False

    def end(self) -> None:
        """Report what was found at the end."""
        for each in self._found(Requests):
            self._report(each)
        faults = [
            f"rank {number}: {event.fault}"
            for number, of_rank in enumerate(self._events[Delivery])
            for event in of_rank
            if event.fault
        ]
        self._report(Delivery(next(iter(faults), "")))
        cells = [each.cells for each in self._found(Sampled)]
        if cells and not faults:
            self._report(Sampled(tuple(cell for of_rank in cells for cell in of_rank)))
        bits = defaultdict[Any, list[Any]](list)
        for entropies in self._found(Entropies):
            bits[entropies.label].append(entropies.bits)
        for label, of_ranks in bits.items():
            n_rounds = min(each.size for each in of_ranks)
            self._report(Entropies(label, np.mean([each[:n_rounds] for each in of_ranks], axis=0)))

    def _found(self, kind: type) -> list[Any]:
        return [event for of_rank in self._events[kind] for event in of_rank]


def _started(events: Sequence[Started], unshared_bytes: int) -> Started:
    return replace(
        events[0],
        worker_seconds=max(each.worker_seconds for each in events),
        first_minibatch_seconds=max(each.first_minibatch_seconds for each in events),
        waiting_bytes=sum(each.waiting_bytes for each in events),
        unshared_bytes=unshared_bytes,
    )


def _round(events: Sequence[Round]) -> Round:
    reads = [each.read for each in events if each.read is not None]
    read = None
    if len(reads) == len(events):
        asked, stored = (
            sum(each.asked for each in reads),
            sum(each.from_storage for each in reads),
        )
        read = BytesRead(asked, stored)
    return replace(
        events[0],
        seconds=max(each.seconds for each in events),
        waiting_seconds=sum(each.waiting_seconds for each in events) / len(events),
        read=read,
        statistics=None,  # where time goes is looked at in one process
    )
