"""A process beside this one in which configurations are timed.

Each configuration runs in a fresh child of that process, so that its memory is its own, nothing
is left over from another, and one that is killed takes nothing with it: it is tried once more,
since memory may have been short for a moment only. The process holds what
requests are about, such as a collection, and has no other threads, so that it can fork safely; it
is started without multiprocessing, which would run a user's script again.
"""

import contextlib
import errno
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from cellfeed import CellfeedError
from cellfeed_tuner._constants import (
    LOOKING_SHARE,
    MEMORY_AT_LEAST_EVERY_SECONDS,
    MEMORY_EVERY_SECONDS,
)
from cellfeed_tuner._machine._busy import OtherPrograms, ProcessorClock
from cellfeed_tuner._machine._processes import (
    ChildKilledError,
    kill_tree,
    tree_cpu_seconds,
    tree_memory_bytes,
)

__all__ = [
    "MeasuringError", "MeasuringProcess", "Outcome", "Request", "Runs", "serve",
]  # fmt: skip


# What torch raises in the process whose worker was killed, or ended without a word.
_OF_KILLED_WORKER = "DataLoader worker (pid"

Subject = TypeVar("Subject")
Subject_contra = TypeVar("Subject_contra", contravariant=True)


class Request(Protocol[Subject_contra]):
    """What a child is to do; it is sent to the process, and so can be pickled."""

    def run(self, subject: Subject_contra, report: Callable[[object], None]) -> None:
        """Do it, and report each event as it happens."""
        ...


Request_contra = TypeVar("Request_contra", contravariant=True)


class Runs(Protocol[Request_contra]):
    """What runs requests of a kind: a `MeasuringProcess`, or what stands for one."""

    def run(self, request: Request_contra, *, limit_seconds: float) -> "Outcome":
        """Do what is requested, for at most ``limit_seconds``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one child reported, in the order in which it happened.

    ``peak_memory_bytes`` is of the child and its workers, sampled. ``failure`` is None also if only
    its time was up. ``n_killed`` is how many of two children were killed; 0 if the first was not.
    """

    events: tuple[object, ...]
    peak_memory_bytes: int
    failure: str | None
    n_killed: int = 0
    others: OtherPrograms = field(default_factory=OtherPrograms)


class MeasuringError(CellfeedError, RuntimeError):
    """The process in which configurations are timed has died."""


class MeasuringProcess(Generic[Subject]):
    """The process, as its parent sees it; a context manager."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __enter__(self) -> Self:
        self._connection, theirs = multiprocessing.Pipe()
        serve = f"from {__name__} import serve; serve({theirs.fileno()}, {sys.path!r})"
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            # -P: a module in the current folder must not stand in for one of ours. A session of
            # its own: Ctrl-C is for this process, which then ends that one.
            [sys.executable, "-P", "-c", serve],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connection.close()  # it ends when its connection does
        if kind is not None:
            kill_tree(self._process.pid)
        self._process.wait()

    def start(self) -> None:
        """Hand over the subject, and wait until the imports are done, or raise `MeasuringError`."""
        self._answer_to(self._subject)

    def _answer_to(self, message: object) -> Any:
        try:
            self._connection.send(message)
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            msg = "the measuring process died, perhaps for want of memory; free some and try again"
            raise MeasuringError(msg) from error

    def run(self, request: Request[Subject], *, limit_seconds: float) -> Outcome:
        """Have a child do what is requested; it is killed after ``limit_seconds``.

        If it, or a worker of it, was killed by something else, another child does it, in what is
        left of the time. What reading raised, such as for a damaged file, is raised here.
        """
        outcome: Outcome | CellfeedError = self._answer_to((request, limit_seconds))
        if isinstance(outcome, CellfeedError):
            raise outcome
        return outcome


_OF_FORK = (errno.ENOMEM, errno.EAGAIN)  # there is no memory, or no process, for a child


def serve(fd: int, path: Sequence[str]) -> None:
    """Be the process: take a subject, then requests, over an inherited connection.

    Modules are looked for where the parent does, after those that are installed.
    """
    _offer_to_oom_killer(500)
    sys.path += [each for each in path if each not in sys.path]
    # What requests need, in the time until the first one comes, and once for all children.
    import cellfeed_tuner._measuring._timing  # noqa: F401, PLC0415

    connection: Connection[Any, Any] = Connection(fd)
    # Of a parent that was interrupted while it received, the connection is reset.
    with contextlib.suppress(EOFError, ConnectionError):
        subject = connection.recv()
        connection.send("ready")
        while True:
            request, limit_seconds = connection.recv()
            # Nobody sends while an answer is owed: what comes then is the end of the parent.
            try:
                outcome = _run_twice_if_killed(
                    subject, request, limit_seconds, abandoned=connection.poll
                )
            except (MemoryError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _OF_FORK:
                    raise
                return  # without memory for a child; the parent sees the end
            connection.send(outcome)


def _run_twice_if_killed(
    subject: Subject,
    request: Request[Subject],
    limit_seconds: float,
    abandoned: Callable[[], bool],
) -> Outcome | CellfeedError:
    start = time.monotonic()
    first = _run_in_child(subject, request, limit_seconds, abandoned)
    left = start + limit_seconds - time.monotonic()
    if isinstance(first, CellfeedError) or not first.n_killed or left <= 0:
        return first
    second = _run_in_child(subject, request, left, abandoned)
    if isinstance(second, CellfeedError):
        return second
    return replace(
        second,
        peak_memory_bytes=max(first.peak_memory_bytes, second.peak_memory_bytes),
        n_killed=first.n_killed + second.n_killed,
        others=first.others + second.others,
    )


def _run_in_child(
    subject: Subject,
    request: Request[Subject],
    limit_seconds: float,
    abandoned: Callable[[], bool],
) -> Outcome | CellfeedError:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    clock = ProcessorClock()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # so that whatever it starts can be found when it has ended
        _child(subject, request, sender)
    sender.close()
    events, peak, cpu_seconds = list[object](), 0, 0.0
    end = _Ended(None)
    for event in _events(receiver, limit_seconds, abandoned):
        if isinstance(event, _Ended):
            end = event
        elif event is None:
            peak = max(peak, tree_memory_bytes(pid))
            # Workers may end before the last look, and nobody asks for their time then.
            cpu_seconds = max(cpu_seconds, tree_cpu_seconds(pid))
        else:
            events.append(event)
    others = clock.others(max(cpu_seconds, tree_cpu_seconds(pid)))
    kill_tree(pid)
    os.waitpid(pid, 0)
    receiver.close()
    if isinstance(end.failure, CellfeedError):
        return end.failure
    return Outcome(
        events=tuple(events),
        peak_memory_bytes=peak,
        failure=end.failure,
        n_killed=int(end.was_killed),
        others=others,
    )


@dataclass(frozen=True, slots=True)
class _Ended:
    failure: str | CellfeedError | None
    was_killed: bool = False


def _child(subject: Subject, request: Request[Subject], sender: "Connection[Any, Any]") -> None:
    """Time, report and end, without waiting for workers that still read."""
    _offer_to_oom_killer(1000)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", message=".* is read slowly")  # which the report says
    try:
        request.run(subject, sender.send)
        sender.send(_Ended(None))
    except CellfeedError as error:
        sender.send(_Ended(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs in the report
        said = str(error) or repr(error)
        was_killed = isinstance(error, ChildKilledError) or said.startswith(_OF_KILLED_WORKER)
        sender.send(_Ended(said, was_killed=was_killed))
    finally:
        os._exit(0)


def _offer_to_oom_killer(score: int) -> None:
    """Have Linux kill this process and its children first where memory runs out.

    The parent keeps what was measured before, and reports the kill.
    """
    with contextlib.suppress(OSError):  # there is no such file elsewhere
        Path("/proc/self/oom_score_adj").write_text(str(score))


def _events(
    receiver: "Connection[Any, Any]", limit_seconds: float, abandoned: Callable[[], bool]
) -> Iterator[object]:
    """Yield what the child reports until it ends, and None whenever to look at what it takes."""
    start = looked = time.monotonic()
    every = MEMORY_EVERY_SECONDS
    while (now := time.monotonic()) < start + limit_seconds and not abandoned():
        if now > looked + every:
            began = time.thread_time()
            yield None
            looked, taken = time.monotonic(), time.thread_time() - began
            every = min(max(every, taken / LOOKING_SHARE), MEMORY_AT_LEAST_EVERY_SECONDS)
        if not receiver.poll(MEMORY_EVERY_SECONDS):
            continue
        try:
            event = receiver.recv()
        except EOFError:
            yield _Ended("the process was killed, perhaps for want of memory", was_killed=True)
            return
        if isinstance(event, _Ended):
            yield None
            yield event
            return
        yield event
