"""Tests without a mark are light: they start no process, and take little processor time.

That keeps `make test`, which runs them, fast. The first is checked in each run, the second where
`--light-seconds` is given, as `make test-all` does.
"""

import importlib
import importlib.util
import os
import platform
import reprlib
import sys
import time
from typing import Any

import pytest

HEAVY = "slow", "process", "server", "docs"
STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}
# What takes a test seconds to import if it is the first one that does.
IMPORTED = (
    "anndata", "cellfeed_tuner.plots", "datasets", "hypothesis", "pyarrow", "scipy.stats", "torch",
    "zarr",
)  # fmt: skip
# Examples that hypothesis tries in the complete run, for each one that it tries in `make test`.
EXAMPLES = 25 / 8
# How much longer the same work may take on a core that is shared.
NOISE = 2.0
# Processor seconds of `fixed_work` on a quiet core of the machine for which the limit was chosen.
FIXED_WORK_SECONDS = 0.1

_started = list[str]()


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--light-seconds", type=float, help="processor seconds that a test without a mark may take"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    platform.processor()  # asks `uname`, the first time
    sys.addaudithook(_note_start)
    if session.config.getoption("--light-seconds") is not None:
        for name in IMPORTED:
            if importlib.util.find_spec(name.partition(".")[0]):
                importlib.import_module(name)


def _note_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS:
        _started.append(reprlib.repr((event, *arguments[:2])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    if any(item.get_closest_marker(name) for name in HEAVY):
        return (yield)
    began = processor_seconds()
    result = yield
    seconds = processor_seconds() - began
    if _started:
        pytest.fail(f"it starts a process: mark it `process` ({_started[0]})", pytrace=False)
    limit = item.config.getoption("--light-seconds")
    if limit is None:
        return result
    if draws_examples(item):
        limit *= EXAMPLES
    # A slow or busy machine takes longer for everything.
    if seconds > NOISE * limit and seconds > limit * fixed_work() / FIXED_WORK_SECONDS:
        pytest.fail(
            f"it takes {seconds:.1f} of at most {limit:.1f} processor seconds: make it lighter, or "
            "mark it `slow`",
            pytrace=False,
        )
    return result


def draws_examples(item: pytest.Item) -> bool:
    """Return whether hypothesis draws examples for a test, also in cellfeed's suites."""
    suites = getattr(getattr(item, "cls", None), "__mro__", ())
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False) or any(
        each.__module__.startswith("cellfeed.testing") for each in suites
    )


def processor_seconds() -> float:
    """Return the processor time of this process and its ended children, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def fixed_work() -> float:
    """Return the processor time of a fixed amount of work now, in seconds."""
    began, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number & 7
    return time.process_time() - began
