"""Tests without a mark start no process, which keeps `make test`, which runs them, fast."""

import platform
import reprlib
import sys
from typing import Any

import pytest

HEAVY = "slow", "process", "server", "docs"
STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}

_started = list[str]()


def pytest_sessionstart() -> None:
    platform.processor()  # asks `uname`, the first time
    sys.addaudithook(_note_start)


def _note_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS:
        _started.append(reprlib.repr((event, *arguments[:2])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    result = yield
    if _started and not any(item.get_closest_marker(name) for name in HEAVY):
        pytest.fail(f"it starts a process: mark it `process` ({_started[0]})", pytrace=False)
    return result
