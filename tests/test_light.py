"""A test without a mark that starts a process, or computes for long, fails and says what to do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests import light

light.IMPORTED = ()

def pytest_addoption(parser):
    light.add_option(parser)

def pytest_configure(config):
    config.pluginmanager.register(light)
    config.addinivalue_line("markers", "slow")
    config.addinivalue_line("markers", "process")
"""
TESTS = """
import os, pytest, subprocess, sys, time

def start():
    subprocess.run([sys.executable, "-c", ""])

def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

def compute():
    while time.process_time() < END:
        pass

def compute_elsewhere():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 1: pass"])

def wait():
    time.sleep(0.3)

END = time.process_time() + 1

@pytest.mark.parametrize("work", [start, fork, compute, wait])
def test_light(work):
    work()

@pytest.mark.slow
def test_slow():
    compute()

@pytest.mark.process
@pytest.mark.parametrize("work", [start, fork, compute_elsewhere])
def test_process(work):
    work()
"""


@pytest.mark.process
@pytest.mark.parametrize("options", [[], ["--light-seconds=0.1"]])
def test_what_is_not_light_fails(tmp_path, options):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = set(re.findall(r"^FAILED test_it.py::(\S+)", ran.stdout, re.MULTILINE))
    computes = {"test_light[compute]"} if options else set()
    assert failed == {"test_light[start]", "test_light[fork]"} | computes, ran.stdout
    assert ran.stdout.count("it starts a process: mark it `process`") >= 2
    assert ("processor seconds: make it lighter" in ran.stdout) == bool(options)
