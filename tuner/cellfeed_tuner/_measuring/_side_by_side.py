"""Timing a configuration in one process for each rank, side by side, as one measurement.

The processes are forked by the one that measures, which does nothing else meanwhile, and so is the
place where their memory and processor time are summed up. They wait for each other at the end of
every round, as ranks do in training: a round takes as long as on the slowest rank, and gives the
cells of all.
"""

import multiprocessing
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import psutil

from cellfeed import CellfeedError, ParameterError
from cellfeed_tuner._machine._processes import BytesRead, ChildKilledError, kill_tree
from cellfeed_tuner._measuring._events import Findings, Round, Started

__all__ = ["Pace", "run_side_by_side"]


class Pace:
    """How processes keep in step, of which this is one; without a ``barrier``, one by itself.

    Parameters
    ----------
    number
        Which of them it is.
    barrier, has_ended, n_rounds
        What they share, which are forked after it is made.

    Raises
    ------
    threading.BrokenBarrierError
        From all methods that wait: another has left.
    """

    def __init__(
        self, number: int = 0, barrier: Any = None, has_ended: Any = None, n_rounds: Any = None
    ) -> None:
        self._number, self._barrier = number, barrier
        self._has_ended, self._n_rounds = has_ended, n_rounds
        self.is_first, self.is_alone = number == 0, barrier is None

    @classmethod
    def of_all(cls, n: int) -> "list[Pace]":
        """Return those of so many processes."""
        context = multiprocessing.get_context("fork")
        shared = context.Barrier(n), context.RawValue("b", 0), context.RawArray("q", n)
        return [cls(number, *shared) for number in range(n)]

    def require_alike(self, n_rounds: int) -> None:
        """Refuse epochs of different lengths, in which ranks would wait for each other for ever."""
        if self.is_alone:
            return
        self._n_rounds[self._number] = n_rounds
        self.meet()
        found = list(self._n_rounds)
        if len(set(found)) > 1:
            msg = (
                f"an epoch has {found} rounds of whole fetches on ranks 0 to {len(found) - 1}, "
                "which would wait for each other for ever; give each rank as many minibatches"
            )
            raise ParameterError(msg)

    def meet(self) -> float:
        """Wait until all are here, and return for how many seconds."""
        if self.is_alone:
            return 0.0
        began = time.perf_counter()
        self._barrier.wait()
        return time.perf_counter() - began

    def agreed(self, *, ended: bool) -> bool:
        """Return what the first has to say, when all are here."""
        if self.is_alone:
            return ended
        if self.is_first:
            self._has_ended.value = ended
        self.meet()
        return bool(self._has_ended.value)

    def leave(self) -> None:
        """Let nobody wait for this one any more."""
        if not self.is_alone:
            self._barrier.abort()


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
    pipes = [Pipe(duplex=False) for _ in range(n)]
    own_bytes = _own_bytes()
    pids = [_forked(run, number, pace, pipes) for number, pace in enumerate(Pace.of_all(n))]
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
        by_rank = {n: each for n, of_rank in enumerate(self._events[Findings]) for each in of_rank}
        found = by_rank.values()
        faults = [f"rank {number}: {each.fault}" for number, each in by_rank.items() if each.fault]
        bits = defaultdict[Any, list[Any]](list)
        for each in found:
            for label, of_rank in each.entropies.items():
                bits[label].append(of_rank)
        findings = Findings(
            fault=next(iter(faults), ""),
            n_requests=max((each.n_requests for each in found), default=0),
            cells=() if faults else tuple(cell for each in found for cell in each.cells),
            entropies={
                label: np.mean([each[: min(map(len, of_ranks))] for each in of_ranks], axis=0)
                for label, of_ranks in bits.items()
            },
        )
        self._report(findings)


def _started(events: Sequence[Started], unshared_bytes: int) -> Started:
    return replace(
        events[0],
        worker_seconds=max(each.worker_seconds for each in events),
        first_minibatch_seconds=max(each.first_minibatch_seconds for each in events),
        waiting_bytes=unshared_bytes + sum(each.waiting_bytes for each in events),
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
