"""A process beside this one in which configurations are timed.

Each configuration runs in fresh children of that process, one for each rank. So its memory is its
own, nothing is left over from another, and one that is killed takes nothing with it. The process
holds the subject of requests, such as a collection, and has no other threads, so that it can fork
safely; it is started without multiprocessing, which would run a user's script again.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from mmap import mmap
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, Protocol, Self

import psutil

from cellfeed import CellfeedError, ParameterError
from cellfeed_tuner._constants import LOOKING_SHARE
from cellfeed_tuner._machine import OtherPrograms, ProcessorClock

# Seconds between two checks of a process's memory: initially, and at most if checking takes more
# than its share. Chosen: short compared with a fetch, and with a replicate.
MEMORY_EVERY_SECONDS, MEMORY_AT_LEAST_EVERY_SECONDS = 0.05, 0.5
# Seconds in which the process must have started. Chosen: ten times what imports take beside twelve
# other programs on two cores.
START_SECONDS = 300.0
# Seconds beyond a time limit in which the measuring process must answer, and in which processes
# that were killed must end. Chosen: short compared with what a run may take beyond its budget.
ANSWER_SECONDS = 4.0
# A loader hangs if it delivered before, and then delivered nothing for the first share of its time
# limit and this many times as long as ever before, while it took less than the last share of a
# processor. Chosen: slow loaders are regular, or compute.
HUNG_SHARE, HUNG_TIMES, COMPUTING_SHARE = 0.5, 3.0, 0.05

_OF_REQUESTS = "cellfeed_tuner._measuring._timing"  # which imports this module
_PROGRESS = struct.Struct("q")
_ENDING_SECONDS = 0.01
_NO_MEMORY_TO_FORK = (errno.ENOMEM, errno.EAGAIN)


class Request(ABC):
    """A child's task. It is pickled to be sent to the process."""

    @abstractmethod
    def run(self, subject: Any, report: Callable[[object], None]) -> None:
        """Do the task; report each event as it happens, and how many minibatches have come."""

    def parts(self) -> "Sequence[Request]":
        """Return the request of each child, which run at the same time."""
        return [self]


class Measures(Protocol):
    """What a run measures with: a `MeasuringProcess`, or this process."""

    def start(self) -> None:
        """Wait until it is ready; see `MeasuringProcess.start`."""
        ...

    def run(self, request: Any, *, limit_seconds: float) -> "Outcome":
        """Run a request for at most ``limit_seconds``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The events that the first child reported, in order, and those of the others.

    ``peak_memory_bytes`` is of all children and their workers, sampled. ``failure`` is None also
    if only the time was up.
    """

    events: tuple[object, ...]
    peak_memory_bytes: int
    failure: str | None
    events_of_others: tuple[tuple[object, ...], ...] = ()
    others: OtherPrograms = field(default_factory=OtherPrograms)


class MeasuringError(CellfeedError, RuntimeError):
    """The process in which configurations are timed has died, or does not answer."""


class MeasuringProcess:
    """The process, as its parent sees it; a context manager.

    ``subject`` is needed by `start`.
    """

    def __init__(self, subject: Any = None) -> None:
        self.subject = subject

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

    def __exit__(self, *_: object) -> None:
        # Its connection would end it too, but it would take a second to delete its modules.
        kill_tree(self._process.pid)
        self._connection.close()
        with contextlib.suppress(TimeoutExpired):  # the kernel does not let it end
            self._process.wait(ANSWER_SECONDS)

    def start(self) -> None:
        """Send the subject, and wait until it has arrived.

        Raises
        ------
        MeasuringError
            The process has died, or has not started after five minutes.
        ParameterError
            The subject cannot be pickled.
        """
        for message in (None, self.subject):  # it has done its imports when it answers the first
            answer = self._answer_to(message, START_SECONDS)
            if isinstance(answer, CellfeedError):
                raise answer

    def _answer_to(self, message: object, limit_seconds: float) -> Any:
        try:
            data = ForkingPickler.dumps(message)
        except Exception as error:
            raise ParameterError(_unpicklable(error)) from error
        try:
            self._connection.send_bytes(data)
            if self._connection.poll(limit_seconds):
                return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            msg = "the measuring process died, perhaps for want of memory; free some and try again"
            raise MeasuringError(msg) from error
        msg = (
            f"the measuring process has not answered for {limit_seconds:.0f} s; close other "
            "programs, and run autotune again"
        )
        raise MeasuringError(msg)

    def run(self, request: Request, *, limit_seconds: float) -> Outcome:
        """Run a request in children, which are killed after ``limit_seconds``.

        A `CellfeedError` of a child, such as for a damaged file, is raised here; also
        `MeasuringError` if the process itself does not answer.
        """
        outcome: Outcome | CellfeedError = self._answer_to(
            (request, limit_seconds), limit_seconds + ANSWER_SECONDS
        )
        if isinstance(outcome, CellfeedError):
            raise outcome
        return outcome


def _unpicklable(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return (
        f"the loader cannot be sent to the measuring process ({said}); define it, and what it "
        "refers to, in a module, and open files in `open`"
    )


def serve(fd: int, path: Sequence[str]) -> None:
    """Be the process: receive a subject, then requests, over an inherited connection.

    Modules are searched in the parent's path after the installed ones.
    """
    _offer_to_oom_killer(500)
    sys.path += [each for each in path if each not in sys.path]
    # Imports that requests need: while the first one is awaited, and once for all children.
    import_module(_OF_REQUESTS)

    connection: Connection[Any, Any] = Connection(fd)
    # If the parent was interrupted while it received, the connection is reset.
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send(connection.recv())
        try:
            subject = connection.recv()
        except (EOFError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever its modules raise
            connection.send(ParameterError(_unpicklable(error)))
            return
        connection.send("ready")
        while True:
            request, limit_seconds = connection.recv()
            # The parent sends nothing before it has the answer, so input means that it has ended.
            try:
                outcome = _run_in_children(subject, request, limit_seconds, connection.poll)
            except (MemoryError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_MEMORY_TO_FORK:
                    raise
                return  # the parent sees the end
            connection.send(outcome)


@dataclass(frozen=True, slots=True)
class _Ended:
    failure: str | CellfeedError | None = None


def _run_in_children(
    subject: Any, request: Request, limit_seconds: float, abandoned: Callable[[], bool]
) -> Outcome | CellfeedError:
    """Run a request until all children have ended, one has failed, or the time is up."""
    clock, deadline = ProcessorClock(), time.monotonic() + limit_seconds
    children: dict[Connection[Any, Any], int] = {}
    events = list[list[object]]()
    end = _Ended()
    parts = request.parts()
    progress = mmap(-1, _PROGRESS.size * len(parts))
    try:
        for rank, part in enumerate(parts):
            receiver, sender = multiprocessing.Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)  # so that processes it starts can be found when it has ended
                _child(subject, part, _Report(sender, progress, rank))
            sender.close()
            children[receiver] = pid
            events.append([])
        usage, running = _Usage([*children.values()]), dict(zip(children, events, strict=True))
        silence = _Silence(usage, progress)
        while running and not end.failure and time.monotonic() < deadline and not abandoned():
            usage.sample_if_due()
            silence.look()
            ready = wait([*running], MEMORY_EVERY_SECONDS)
            for rank, (receiver, pid) in enumerate(children.items()):
                if receiver not in running or (receiver not in ready and end_of(pid) is None):
                    continue
                event = _next_event(receiver, pid, f" of rank {rank}" if len(children) > 1 else "")
                if not isinstance(event, _Ended):
                    running[receiver].append(event)
                    continue
                usage.sample()
                end = end if end.failure else event
                del running[receiver]
        if running and not end.failure:
            end = _Ended(silence.hung())
        others = clock.others(usage.sample())
    finally:
        for receiver, pid in children.items():
            kill_tree(pid)
            reap(pid, limit_seconds=ANSWER_SECONDS / 2)
            receiver.close()
    if isinstance(end.failure, CellfeedError):
        return end.failure
    return Outcome(
        events=tuple(events[0]),
        events_of_others=tuple(map(tuple, events[1:])),
        peak_memory_bytes=usage.peak_memory_bytes,
        failure=end.failure,
        others=others,
    )


class _Usage:
    """Memory and processor time of children and their workers, sampled."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self.peak_memory_bytes, self.cpu_seconds = pids, 0, 0.0
        self._every = MEMORY_EVERY_SECONDS
        self._due = time.monotonic() + self._every

    def sample_if_due(self) -> None:
        """Sample now and then, so that sampling takes little time."""
        if time.monotonic() < self._due:
            return
        began = time.thread_time()
        self.sample()
        taken = time.thread_time() - began
        self._every = min(max(self._every, taken / LOOKING_SHARE), MEMORY_AT_LEAST_EVERY_SECONDS)
        self._due = time.monotonic() + self._every

    def sample(self) -> float:
        """Sample now; return the processor seconds."""
        memory_bytes = sum(map(tree_memory_bytes, self._pids))
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes)
        # The time of workers that have ended may be lost to a later sample.
        self.cpu_seconds = max(self.cpu_seconds, sum(map(tree_cpu_seconds, self._pids)))
        return self.cpu_seconds


class _Silence:
    """How long children have reported nothing."""

    def __init__(self, usage: _Usage, progress: mmap) -> None:
        self._usage, self._progress, self._cpu_seconds = usage, progress, 0.0
        self._began = self._since = time.monotonic()
        self._longest, self._n_minibatches = 0.0, 0

    def look(self) -> None:
        """Notice that minibatches have come."""
        n = sum(each for (each,) in _PROGRESS.iter_unpack(self._progress[:]))
        if n == self._n_minibatches:
            return
        now = time.monotonic()
        self._longest = max(self._longest, now - self._since)
        self._since, self._cpu_seconds = now, self._usage.cpu_seconds
        self._n_minibatches = n

    def hung(self) -> str | None:
        """Return that the loader hangs, in words; None if it may just be slow.

        It hangs if it delivered something before, does not compute, and was silent for long.
        """
        self.look()
        now, n = time.monotonic(), self._n_minibatches
        seconds = now - self._since
        long = max(HUNG_SHARE * (now - self._began), HUNG_TIMES * self._longest)
        computed = self._usage.sample() - self._cpu_seconds
        if not n or seconds < long or computed > COMPUTING_SHARE * seconds:
            return None
        minibatches = f"{n} minibatch{'es' * (n > 1)}"
        return f"hung after {minibatches}: no other came for {seconds:.0f} s"


def _next_event(receiver: "Connection[Any, Any]", pid: int, of_rank: str) -> object:
    """Return the next event of a child that has sent one or has ended.

    If it has ended, its workers may still hold its end of the pipe.
    """
    if receiver.poll():
        with contextlib.suppress(EOFError):
            return receiver.recv()
    deadline = time.monotonic() + ANSWER_SECONDS / 2
    while (found := end_of(pid)) is None and time.monotonic() < deadline:
        time.sleep(_ENDING_SECONDS)  # its connection is closed, but it may still be ending
    return _Ended(f"the process{of_rank} {found or 'closed its connection'}")


class Finished:
    """All is reported: the child ends at once, and what it still reads is not waited for."""


class _Report:
    """What a child calls to report: sends events, and writes progress to shared memory.

    Progress is an integer, the number of minibatches that have come by now. Writing it takes a
    microsecond.
    """

    def __init__(self, sender: "Connection[Any, Any]", progress: mmap, rank: int) -> None:
        self._sender, self._progress, self._place = sender, progress, _PROGRESS.size * rank

    def __call__(self, event: object) -> None:
        if isinstance(event, int):
            _PROGRESS.pack_into(self._progress, self._place, event)
        elif isinstance(event, Finished):
            self._sender.send(_Ended())
            os._exit(0)
        else:
            self._sender.send(event)


def _child(subject: Any, request: Request, report: _Report) -> None:
    """Run a request, report and end, without waiting for workers that still read."""
    _offer_to_oom_killer(1000)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", message=".* is read slowly")  # the report says so
    warnings.filterwarnings("ignore", message="fetches take about")  # their memory is measured
    status = 0
    try:
        request.run(subject, report)
        report(_Ended())
    except CellfeedError as error:
        report(_Ended(error))
    except Exception as error:  # noqa: BLE001 - any error belongs in the report
        report(_Ended(failure_of(error)))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else bool(end.code)
    finally:
        os._exit(status)


def failure_of(error: Exception) -> str:
    """Return what failed; of an error in a worker, what it said there."""
    failure = str(error) or repr(error)
    if "Original Traceback (most recent call last):" in failure:  # a DataLoader quotes it
        failure = f"in a worker: {failure.rstrip().rpartition(chr(10))[2]}"
    return failure


def _offer_to_oom_killer(score: int) -> None:
    """Have Linux kill this process and its children first where memory runs out.

    The parent keeps earlier measurements, and reports the kill.
    """
    with contextlib.suppress(OSError):  # other systems have no such file
        Path("/proc/self/oom_score_adj").write_text(str(score))


_SIGNALS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error",
}


_REAP_SECONDS = 0.01


def kill_tree(pid: int) -> None:
    """Kill a process, its descendants and the process groups that these lead.

    Each is stopped before its children are listed, so that it starts no more of them meanwhile.
    Descendants whose parent has ended are found by their group.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process, members = psutil.Process(pid), set[psutil.Process]()
        new = {process}
        while new:
            for each in new:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    each.suspend()
            members |= new
            new = {*process.children(recursive=True)} - members
        for each in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it leads no group
                os.killpg(each.pid, signal.SIGKILL)
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                each.kill()


def tree_memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants now; 0 if the process is gone.

    The resident memory of the process, plus the unshared memory of each descendant: a forked worker
    shares most of its memory until it writes to it.
    """
    try:
        process = psutil.Process(pid)
        total = int(process.memory_info().rss)
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += int(child.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0
    return total


def tree_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, with ended ones; 0 if gone."""
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
        # User and system time, of itself and of its ended children.
        return float(sum(sum(each.cpu_times()[:4]) for each in tree))
    except psutil.Error:
        return 0.0


def end_of(pid: int) -> str | None:
    """Return how a child ended, in words; None if it still runs.

    Its status is kept for `reap`.
    """
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it was reaped
        return "ended"
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return f"exited with status {found.si_status}"
    if found.si_status == signal.SIGKILL:
        return "was killed, perhaps for want of memory"
    name = _SIGNALS.get(signal.Signals(found.si_status), signal.Signals(found.si_status).name)
    return f"crashed ({name})"


def reap(pid: int, *, limit_seconds: float) -> None:
    """Wait for the end of a killed child; not for one that the kernel does not let end."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(_REAP_SECONDS)
                continue
        return
