"""The harness of comparisons, and each comparison in its smallest size."""

import importlib
import importlib.util
import json
import shutil
import subprocess
import types
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.warm import python as warm

harness: Any = importlib.import_module("bench._harness")
COMPARE = Path(__file__).parents[2] / "bench" / "compare"
NAMES = sorted(each.stem for each in COMPARE.glob("[a-z]*.py"))


def read(seed, sizes):
    """Deliver minibatches."""
    return iter(sizes)


def figures(seed, values):
    """Measure by itself."""
    return {"cells/s": values[seed], "MB": 7.0}


def run(tmp_path, *cases, arguments=(), **options):
    def all_cases(given):
        yield from cases

    out = tmp_path / "found.json"
    harness.main(all_cases, [f"--out={out}", *arguments], **options)
    return json.loads(out.read_text())["tables"]


def test_figures_are_medians_and_ratios_those_within_rounds(tmp_path, capsys):
    speeds = {"ours": [10.0, 30.0, 20.0], "one": [5.0, 10.0, 8.0], "other": [4.0, 15.0, 2.0]}
    ways = {name: harness.here(figures, values=each) for name, each in speeds.items()}
    case = harness.Case(ways, "title", against=["one", "other"])
    (table,) = run(tmp_path, case, n_ratios=1)
    assert table["title"] == "title"
    assert {name: [each["cells/s"] for each in runs] for name, runs in table["ways"].items()} == (
        speeds
    )
    head, _, ours, *_ = [line for line in capsys.readouterr().out.splitlines() if line]
    assert head == "| title | cells/s | times one or other | MB |"
    ratios = [10 / 5, 30 / 15, 20 / 8]
    shown = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    assert ours == f"| ours | 20 [10, 30] | {shown} | 7 [7, 7] |"


def test_the_way_that_begins_differs_from_round_to_round(tmp_path):
    called = []

    def note(seed, name):
        called.append(name)
        return {"x": 1.0}

    run(tmp_path, harness.Case({name: harness.here(note, name=name) for name in "abc"}))
    assert "".join(called) == "abcbcacab"


def test_an_epoch_is_read_to_its_end_unless_the_time_is_up():
    seen = []

    def sizes():
        for k in range(10):
            seen.append(k)
            yield 5

    assert harness.figures_of(sizes())["cells/s"] > 0
    assert len(seen) == 10
    harness.figures_of(sizes(), seconds=0.0)
    assert len(seen) == 11
    assert list(harness.after(7, sizes())) == [5] * 8


@pytest.mark.process
def test_a_way_runs_in_its_own_process(tmp_path):
    ways = {"own": harness.way(read, sizes=[64, 64, 3]), "same": harness.here(read, sizes=[131])}
    (table,) = run(tmp_path, harness.Case(ways), arguments=["--rounds=1"])
    for (found,) in table["ways"].values():
        assert found["cells/s"] > 0
        assert found["peak MB"] > 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds=0"], "`--rounds >= 1` must hold, but got 0"),
        (["--cache=hot"], "invalid choice: 'hot'"),
        (["--seconds=long"], "invalid float value: 'long'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, arguments=arguments, cache=["warm"], seconds=1.0)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.process
def test_a_way_that_fails_ends_the_comparison(tmp_path):
    with pytest.raises(SystemExit, match=r"`read` of .* ended with 1"):
        run(tmp_path, harness.Case({"broken": harness.way(read, nothing=1)}))


def test_files_are_prepared_before_each_turn(tmp_path, monkeypatch):
    dropped: list[Any] = []
    monkeypatch.setattr(harness, "drop", dropped.append)
    case = harness.Case({"one": harness.here(read, sizes=[1])}, files=[tmp_path])
    tables = run(tmp_path, case, arguments=["--cache", "warm", "cold"], cache=["warm"])
    assert [each["title"] for each in tables] == ["warm", "cold"]
    assert dropped == [[tmp_path]] * 3


# What runs in its smallest size wherever its packages are installed.
ONCE = "--rounds=1"
SMALL = {
    "advice": [],  # minutes: `make advice`
    "cellstream": [ONCE, "--seconds=0.1", "--sizes=64", "--threads=1", "--fetch=64"],
    "chunk_codecs": [ONCE, "--chunks=1024", "--least=1", "--only=delta"],
    "cores": [ONCE, "--threads=1", "--fetch=2"],
    "gpu": [],  # test_gpu.py
    "loaded": [ONCE, "--seconds=0.1"],
    "loop": [ONCE, "--seconds=0.1", "--operations=2"],
    "memory_maps": [ONCE, "--cache=warm", "--seconds=0.1"],
    "parquet": [ONCE, "--files=1", "--rows=1000", "--blocks=1024"],
    "perturbation": [],  # needs cell-load, and sets that are not larger than its groups
    "postgres": [],  # needs a server
    "ranks": [],  # a minute for each storage
    "remote": [ONCE, "--servers=web", "--milliseconds=0", "--blocks=16", "--prefetches=1"],
    "scvi": [],  # test_scvi_training.py
    "soma": [],  # needs an experiment
    "tokenizers": [ONCE, "--seconds=0.1"],
    "tokens": ["--tokens=2000000", "--windows=64", ONCE, "--cache=cold"],
    "tunables": [],  # test_compare_tunables.py
}  # fmt: skip
NEEDS = {"cellstream": "cellstream", "memory_maps": "bionemo",
         "parquet": "datasets", "remote": "obstore"}  # fmt: skip


def test_each_is_run_or_it_is_said_why_not():
    assert sorted(SMALL) == NAMES


@pytest.fixture
def forked_ways(monkeypatch):
    """Ways that run in a process find their imports done."""

    def run(command, *, check, **options):
        ran = warm.run(command, **options)
        assert ran.returncode == 0, ran.stderr
        return ran

    forking = types.SimpleNamespace(run=run, PIPE=subprocess.PIPE)
    monkeypatch.setattr(harness, "subprocess", forking)


@pytest.mark.docs
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if SMALL[name]])
def test_runs_in_its_smallest_size(name, collection, tmp_path, forked_ways):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    comparison: Any = importlib.import_module(f"bench.compare.{name}")
    shutil.copytree(collection, tmp_path / "data")
    out = tmp_path / "found.json"
    given = [f"--data={tmp_path / 'data'}", f"--out={out}", *SMALL[name]]
    harness.main(comparison.cases, given, **comparison.OPTIONS)
    tables = json.loads(out.read_text())["tables"]
    assert tables
    for table in tables:
        for runs in table["ways"].values():
            assert all(value is not None for value in runs[0].values())
