"""A test without a mark that starts a process fails and says what to do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests import light

def pytest_configure(config):
    config.pluginmanager.register(light)
    config.addinivalue_line("markers", "process")
"""
TESTS = """
import os, pytest, subprocess, sys

def start():
    subprocess.run([sys.executable, "-c", ""])

def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

def compute():
    return sum(range(1_000))

@pytest.mark.parametrize("work", [start, fork, compute])
def test_light(work):
    work()

@pytest.mark.process
@pytest.mark.parametrize("work", [start, fork])
def test_process(work):
    work()
"""


@pytest.mark.process
def test_what_starts_a_process_fails(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = set(re.findall(r"^FAILED test_it.py::(\S+)", ran.stdout, re.MULTILINE))
    assert failed == {"test_light[start]", "test_light[fork]"}, ran.stdout
    assert ran.stdout.count("it starts a process: mark it `process`") >= 2
