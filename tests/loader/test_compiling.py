"""What is said while functions are compiled, and which ones an epoch compiles or loads."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from tests import commands
from tests.warm import python as warm

from cellfeed._compiled import CompilingNotice


class Kept:
    """A cache that had a function, or had not."""

    def __init__(self, *, was_loaded: bool) -> None:
        self.was_loaded = was_loaded


@pytest.fixture
def said():
    """What is said of functions that take 0.7 s each to compile, and how to compile or load one."""
    said = list[str]()
    ticks = itertools.count()
    notice = CompilingNotice(said.append, clock=lambda: 0.35 * next(ticks))

    def use(*, was_loaded: bool = False, calls: int = 0) -> int:
        with notice.of(Kept(was_loaded=was_loaded)):
            for _ in range(calls):
                use(was_loaded=was_loaded)
        return len(said)

    return said, use


def test_it_is_said_once_and_only_if_it_takes_long(said):
    lines, use = said
    told = [use() for _ in range(60)]
    assert told[:2] == [0, 0]
    (line,) = lines
    assert line == (
        "cellfeed: compiling code, once for this installation and processor (5 to 20 s on a free "
        "core; `cellfeed warm-up` compiles everything at once)"
    )


@pytest.mark.parametrize(("number", "speaks"), [(0, True), (1, False)])
def test_of_the_workers_only_the_first_says_it(said, monkeypatch, number, speaks):
    torch = pytest.importorskip("torch.utils.data")
    monkeypatch.setattr(torch, "get_worker_info", lambda: SimpleNamespace(id=number))
    lines, use = said
    for _ in range(5):
        use()
    assert bool(lines) == speaks


def test_it_is_said_while_one_function_compiles_those_that_it_calls(said):
    lines, use = said
    use(calls=4)
    assert len(lines) == 1


def test_what_is_on_disk_is_not_compiled(said):
    lines, use = said
    for _ in range(30):
        use(was_loaded=True)
    assert lines == []


def test_time_is_counted_once_and_of_what_is_compiled_alone():
    now = 0.0
    notice = CompilingNotice(list[str]().append, clock=lambda: now)
    with notice.of(Kept(was_loaded=False)):
        now += 2
        with notice.of(Kept(was_loaded=False)):
            now += 3
    with notice.of(Kept(was_loaded=True)):
        now += 7
    now += 11
    with notice.of(Kept(was_loaded=False)):
        now += 13
    assert notice.seconds == 2 + 3 + 13


# Iterates over a file, and prints the names of the functions that were compiled or loaded.
USE = """
import json, sys
import cellfeed
from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed._compiled import _everything

dataset = CellDataset(open_collection(sys.argv[1]), BlockShuffling(4), 8, 2, seed=0,
                      **json.loads(sys.argv[2]))
for minibatch in dataset:
    pass
print(json.dumps(sorted(
    each.py_func.__qualname__ for each in _everything if each.overloads
)))
"""
OTHER_CODECS = {"_zstd", "_blosc", "_lz4", "_lzf", "unshuffle", "adder"}
OTHER_PLACES = {"select", "pick", "spread", "gather", "_sort_rows"}
TRANSFORMS = {"transform_rows", "_applies.<locals>.apply"}


@pytest.mark.process
@pytest.mark.parametrize("options", [{}, {"dense": True}])
def test_an_epoch_uses_only_its_own_codec_and_ways_to_place_elements(write_h5ad, options):
    rows = sp.random(60, 20, 0.4, "csr", np.float32, np.random.default_rng(0))
    path = write_h5ad(rows, compression="gzip")
    used = set(json.loads(warm.output_of("-c", USE, path, json.dumps(options))))
    assert {"decode", "_copy", "_inflates.<locals>.inflate"} <= used
    assert not used & (OTHER_CODECS | OTHER_PLACES | TRANSFORMS)
    assert ("_densify" in used) == bool(options)


@pytest.mark.slow
def test_warming_up_compiles_everything():
    ran = commands.cellfeed("warm-up")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith("compiled for this processor in ")
    assert ran.stdout.count("\n") == 1
