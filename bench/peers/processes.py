"""Run a command in its own process group, watch its memory, and end the whole group."""

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_SECONDS = 0.05
SAMPLE_SECONDS = 0.2
LEAST_AVAILABLE_BYTES = 1_500_000_000  # with less, the kernel might kill another process


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes
    ----------
    seconds
        From start to end of the process.
    peak_bytes
        Peak memory of the process and its descendants; None if not watched.
    output
        Its standard output.
    error
        Why it failed, in one line; None if it did not.
    """

    seconds: float
    peak_bytes: int | None
    output: str
    error: str | None

    def answer(self) -> dict:
        """Return the JSON object in the last line of the output."""
        return json.loads(self.output.splitlines()[-1])


def run(command: list, *, timeout: float, log: Path, watch_memory: bool) -> Outcome:
    """Run a command until it ends or has to be ended.

    Parameters
    ----------
    command
        Program and arguments.
    timeout
        Seconds until it is ended.
    log
        Where its standard error goes; its standard output goes beside it.
    watch_memory
        Whether to read its memory several times a second, which costs it a little time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output = log.with_suffix(".out")
    start = time.perf_counter()
    with log.open("w") as errors, output.open("w") as answers:
        process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=answers,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            reason, peak_bytes = _attend(process, start + timeout, watch_memory=watch_memory)
        finally:
            seconds = time.perf_counter() - start
            _end_group(process)
    if reason is None and process.returncode != 0:
        reason = last_line(log) or f"ended with exit status {process.returncode}"
    if reason == "timeout":
        reason = f"not done after {timeout:.0f} s"
    return Outcome(seconds, peak_bytes, output.read_text(), reason)


def _attend(
    process: subprocess.Popen, deadline: float, *, watch_memory: bool
) -> tuple[str | None, int | None]:
    """Wait for a process to end; return why it has to be ended, and its peak memory."""
    peak_bytes, next_sample = 0, 0.0
    while True:
        now = time.perf_counter()
        if watch_memory and now >= next_sample:
            peak_bytes = max(peak_bytes, tree_memory_bytes(process.pid))
            next_sample = now + SAMPLE_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        if process.returncode is not None:
            return None, peak_bytes or None
        if now > deadline:
            return "timeout", peak_bytes or None
        available = psutil.virtual_memory().available
        if available < LEAST_AVAILABLE_BYTES:
            return f"left less than {LEAST_AVAILABLE_BYTES / 1e9} GB of memory", peak_bytes or None


def _end_group(process: subprocess.Popen) -> None:
    """End the rest of the group: a stuck peer, or workers that outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tree_memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants.

    Shared memory counts once: each process contributes its proportional share. For a single
    process, this is its resident memory, which is cheaper to read.
    """
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        if len(family) == 1:
            return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += member.memory_full_info().pss
    return total


def last_line(log: Path) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
