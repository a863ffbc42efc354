"""Processes: of which interpreter, from which page cache, with how much memory, ended as a group.

Each peer has its own virtual environment, made on first use from pinned versions.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

POLL_SECONDS = 0.05
SAMPLE_SECONDS = 0.2
LEAST_AVAILABLE_BYTES = 1_500_000_000  # with less, the kernel might kill another process
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

REQUIREMENTS = Path(__file__).parent / "environments"
DEFAULT_FOLDER = Path(__file__).parents[2] / ".peers"
DEFAULT_PYTHON = "3.11"
PYTHON_OF = {"annbatch": "3.12"}
INSTALL_SECONDS = 3600


class FailedError(Exception):
    """A peer cannot be installed or started, or delivers wrong cells; the message is one line.

    It ends a row of the comparison, but not the comparison.
    """


def say(message: str) -> None:
    """Print progress on stderr."""
    click.echo(message, err=True)


class Interpreters:
    """Finds the interpreter of each environment, making the environment if needed.

    Parameters
    ----------
    folder
        Where the environments are.
    pythons
        Where the Python of a version is, as ``{"3.12": path}``; others are searched for.
    """

    def __init__(self, folder: Path, pythons: dict[str, Path]):
        self._folder, self._pythons = folder.resolve(), pythons
        self._outcomes: dict[str, Path | FailedError] = {}

    def of(self, environment: str | None) -> Path:
        """Return the interpreter of an environment, None for the project's own.

        Raises
        ------
        FailedError
            It cannot be made. Later calls fail again without another attempt.
        """
        if environment is None:
            return Path(sys.executable)
        if environment not in self._outcomes:
            try:
                self._outcomes[environment] = self._make(environment)
            except FailedError as error:
                self._outcomes[environment] = error
        outcome = self._outcomes[environment]
        if isinstance(outcome, FailedError):
            raise outcome
        return outcome

    def _make(self, environment: str) -> Path:
        requirements = REQUIREMENTS / f"{environment}.txt"
        folder = self._folder / environment
        version = PYTHON_OF.get(environment, DEFAULT_PYTHON)
        stamp = hashlib.sha256(version.encode() + requirements.read_bytes()).hexdigest()
        installed = folder / ".installed"
        if not (installed.exists() and installed.read_text() == stamp):
            python = self._python(version)
            say(f"Making the environment {folder} ...")
            shutil.rmtree(folder, ignore_errors=True)
            _install([python, "-m", "venv", folder])
            pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
            _install([*pip, "install", "--quiet", "--requirement", requirements])
            installed.write_text(stamp)
        return folder / "bin" / "python"

    def _python(self, version: str) -> Path:
        if version not in self._pythons:
            return find_python(version)
        python = self._pythons[version]
        if version_of(python) != version:
            raise FailedError(f"a Python {version} is required, but `{python}` is none")
        return python


@functools.cache
def find_python(version: str) -> Path:
    """Return a Python of a version such as 3.12, from PATH or from pyenv."""
    on_path = shutil.which(f"python{version}")
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}*/bin/python"))
    for candidate in [*([Path(on_path)] if on_path else []), *of_pyenv]:
        if version_of(candidate) == version:
            return candidate
    raise FailedError(f"Python {version} was found neither on PATH nor by pyenv")


def version_of(python: Path) -> str | None:
    """Return the version of a Python, or None if it does not run: pyenv puts shims on PATH."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def _install(command: list) -> None:
    """Run a command that makes an environment."""
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=INSTALL_SECONDS)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason"]
        raise FailedError(f"cannot be installed: {reasons[-1].strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"not installed after {INSTALL_SECONDS} s") from error


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


def drop_pages(folders: list[Path]) -> str:
    """Write everything to disk, forget the pages of all files in some folders, and say how."""
    os.sync()  # a page that is not on disk yet cannot be dropped
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
    with contextlib.suppress(OSError):
        DROP_CACHES.write_text("1")
        return "dropped by posix_fadvise for each file, then by drop_caches"
    return "dropped by posix_fadvise for each file"
