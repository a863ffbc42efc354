"""What is said while numba compiles."""

import importlib.util
import itertools
import sys

import pytest
from numba import njit
from numba.core.event import install_listener

from cellfeed._chunks._compiling import CompilingNotice


@pytest.fixture
def said():
    """What is said of functions that take 0.7 s each to compile."""
    said = list[str]()
    ticks = itertools.count()
    notice = CompilingNotice(said.append, clock=lambda: 0.7 * next(ticks))
    with install_listener("numba:compile", notice):
        yield said


def compile_one(module):
    def increment(n):
        return n + 1

    increment.__module__ = module
    assert njit("int64(int64)")(increment)(1) == 2


def test_it_is_said_once_and_only_if_it_takes_long(said):
    told = []
    for _ in range(4):
        compile_one("cellfeed._loops")
        told.append(len(said))
    assert told == [0, 0, 1, 1]
    assert said[0].startswith("cellfeed: compiling ")
    assert "\n" not in said[0]


def test_what_others_compile_is_not_our_business(said):
    for _ in range(4):
        compile_one("cellfeedback")
    assert said == []


def test_what_is_on_disk_is_not_compiled(said, tmp_path, monkeypatch):
    path = tmp_path / "loops.py"
    path.write_text(
        "from numba import njit\n\n"
        "@njit('int64(int64)', cache=True)\n"
        "def increment(n):\n"
        "    return n + 1\n\n"
        "@njit('int64(int64)', cache=True)\n"
        "def decrement(n):\n"
        "    return n - 1\n"
    )

    def load():
        spec = importlib.util.spec_from_file_location("cellfeed.loops", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "cellfeed.loops", module)
        spec.loader.exec_module(module)
        assert module.increment(module.decrement(3)) == 3

    load()
    assert said == []  # it took 1.4 s, and nothing is to come
    for _ in range(3):
        load()
    assert said == []
    compile_one("cellfeed._loops")
    assert len(said) == 1
