"""The asv suite and its verdict on two commits; asv itself runs on a suite of two benchmarks."""

import importlib
import inspect
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from asv_runner.statistics import compute_stats
from scipy.stats import mannwhitneyu

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "bench" / "suite"
MODULES = ("entropy", "opening", "plan", "reading", "search", "serving", "start")


@pytest.fixture
def verdict(monkeypatch):
    monkeypatch.syspath_prepend(SUITE)
    return importlib.import_module("verdict")


@pytest.fixture
def compared(verdict):
    """Returns what became of a figure with these values before and after."""

    def figure(kind, value):
        if not isinstance(value, list):
            return verdict.Figure(kind=kind, unit="seconds", value=value)
        median, stats = compute_stats(value, 1)
        return verdict.Figure(kind=kind, unit="seconds", value=median, stats=stats, samples=value)

    def compared(kind, before, after):
        base = {} if before == "none" else {"figure": figure(kind, before)}
        return verdict.compare(base, {"figure": figure(kind, after)})

    return compared


def around(median, spread):
    return [median + spread * k for k in range(-5, 6)]


@pytest.mark.parametrize(
    ("kind", "before", "after", "change", "accepted"),
    [
        ("track", 100.0, 101.0, "worse", False),
        ("track", 100.0, 100.2, "worse", False),
        ("track", 100.0, 100.05, "same", True),  # within a thousandth
        ("track", 0.0, 1e-12, "same", True),
        ("track", 0.0, 1e-3, "worse", False),
        ("track", -1e-3, -2e-3, "better", True),
        ("track", 100.0, 99.0, "better", True),
        ("track", 100.0, None, "failed", False),
        ("track", None, 100.0, "new", True),
        ("track", "none", 100.0, "new", True),
        ("track", 100.0, math.nan, "lost", False),
        ("track", math.nan, 100.0, "new", True),
        ("track", math.nan, math.nan, "skipped", False),  # nothing else was measured
        ("time", around(1.0, 0.01), around(1.3, 0.01), "worse", True),
        ("time", around(1.0, 0.01), around(1.08, 0.01), "same", True),  # within 10 %
        ("time", around(1.0, 0.09), around(1.3, 0.2), "same", True),  # as chance has it
        ("time", around(1.3, 0.01), around(1.0, 0.01), "better", True),
        ("time", around(1.0, 0.01), None, "failed", False),
        ("peakmemory", 100, 109, "same", True),
        ("peakmemory", 100, 120, "worse", True),
    ],
)
def test_counters_gate_and_all_else_advises(
    verdict, compared, kind, before, after, change, accepted
):
    comparisons = compared(kind, before, after)
    assert [str(each.change) for each in comparisons] == [change]
    assert verdict.is_accepted(comparisons) is accepted
    last = verdict.report(comparisons).splitlines()[-1]
    assert last.startswith("VERDICT: PASSED" if accepted else "VERDICT: FAILED")


def test_nothing_measured_is_no_pass(verdict):
    assert not verdict.is_accepted([])
    assert verdict.report([]).endswith("nothing was measured.")


def test_what_got_worse_is_told_with_both_figures(verdict, compared):
    told = verdict.report([*compared("track", 100, 125), *compared("time", 1.0, 2.0)])
    assert "1 of 1 counters are worse" in told
    assert "1 of 1 times and memory figures are worse" in told
    assert [line.split() for line in told.splitlines() if "figure " in line] == [
        line.split()
        for line in (
            "| 100 seconds | 125 seconds | 1.25 | figure |",
            "| 1.00s | 2.00s | 2.00 | figure |",
        )
    ]


@pytest.fixture
def clone(tmp_path):
    """A repository with the suite's commands, and two benchmarks of a package."""
    root = tmp_path / "clone"
    shutil.copytree(SUITE, root / "bench" / "suite")
    shutil.copy(ROOT / "asv.conf.json", root)
    (root / "tuner").mkdir()
    (root / "tuner" / "empty.py").touch()
    (root / "loader").mkdir()
    (root / "loader" / "package.py").write_text("def read():\n    return 1\n")
    (root / "bench" / "__init__.py").touch()
    (root / "bench" / "reads.py").write_text(
        "import package\n\n"
        "class Reads:\n"
        "    repeat, warmup_time = 5, 0.01\n"
        "    def time_read(self):\n"
        "        package.read()\n"
        "    def track_reads(self):\n"
        "        return package.read()\n"
    )
    (root / ".gitignore").write_text(".asv/\n__pycache__/\n")
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "First"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def run(clone, *arguments):
    command = [sys.executable, clone / "bench" / "suite" / "cli.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.docs
@pytest.mark.process
def test_a_planted_extra_read_gates_and_a_planted_slowdown_is_told(clone):
    slow_and_twice = "import time\n\ndef read():\n    time.sleep(0.01)\n    return 2\n"
    (clone / "loader" / "package.py").write_text(slow_and_twice)
    ended = run(clone, "compare", "HEAD")
    assert ended.returncode == 1, ended.stderr
    first, *_, last = ended.stdout.splitlines()
    assert first.startswith("Base: HEAD (")
    assert first.endswith(", with changes")
    assert last == "VERDICT: FAILED, 1 counters are worse, 0 figures failed."
    worse = [line for line in ended.stdout.splitlines() if "reads.Reads" in line]
    assert ["track_reads" in line or "time_read" in line for line in worse] == [True, True]
    assert "2.00" in worse[0]
    (results,) = (clone / ".asv" / "head" / "results").glob("*/*python*.json")
    table = json.loads(results.read_text())
    timed = dict(
        zip(table["result_columns"], table["results"]["reads.Reads.time_read"], strict=False)
    )
    assert len(timed["samples"][0]) == 10  # of two passes, as many as the rank test needs


@pytest.mark.docs
@pytest.mark.process
@pytest.mark.parametrize(
    ("suite", "told"),
    [
        (
            "def track_nothing():\n    return 1 / 0\ndef track_one():\n    return 1\n",
            ["FAILED: broken.track_nothing", "1 of 2"],
        ),
        (
            "def setup():\n    raise NotImplementedError\ndef track_it():\n    return 1\n",
            ["0 of 1"],
        ),
        ("import nowhere\n", []),
    ],
    ids=["fails in part", "skips all", "cannot be imported"],
)
def test_a_run_that_measured_nothing_or_failed_is_a_failure(clone, suite, told):
    (clone / "bench" / "reads.py").unlink()
    (clone / "bench" / "broken.py").write_text(suite)
    ended = run(clone, "check")
    assert ended.returncode == 1, ended.stderr
    assert all(each in ended.stdout for each in told)


@pytest.mark.docs
@pytest.mark.process
def test_a_base_that_does_not_exist_is_told_in_one_line(clone):
    ended = run(clone, "compare", "--", "-nowhere")
    assert ended.returncode == 2
    assert "there is no commit, branch or tag `-nowhere` here" in ended.stderr.splitlines()[-1]


def test_the_packages_of_the_suite_are_pinned_as_those_of_the_tests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = json.loads((ROOT / "asv.conf.json").read_text())["matrix"]["req"]
    assert {re.split(r"[<>=!~\[ ]", each)[0] for each in project["dependencies"]} <= pins.keys()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = dict(line.split("==") for line in lines if "==" in line)
    assert {name: [constraints[name]] for name in pins} == pins


def benchmarks():
    """Return the benchmarks of the suite: class and name."""
    for name in MODULES:
        module = importlib.import_module(f"bench.{name}")
        for cls_name, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and not cls_name.startswith("_"):
                yield (
                    cls,
                    [each for each in dir(cls) if each.startswith(("time_", "peakmem_", "track_"))],
                )


def test_every_module_of_the_suite_is_looked_at(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    found = {path.stem for path in (ROOT / "bench").glob("*.py") if path.stem[0] != "_"}
    assert found == set(MODULES)
    assert {cls.__module__ for cls, _ in benchmarks()} == {f"bench.{name}" for name in MODULES}


def test_times_and_memory_are_in_pairs_and_counters_have_units(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    for cls, names in benchmarks():
        work = {
            kind: {each.removeprefix(kind) for each in names if each.startswith(kind)}
            for kind in ("time_", "peakmem_")
        }
        if getattr(cls, "in_processes_of_its_own", False):  # whose memory asv does not see
            work["peakmem_"] |= work["time_"]
        assert work["time_"] == work["peakmem_"] != set(), cls
        assert all(getattr(cls, each).unit for each in names if each.startswith("track_"))


def test_the_rank_test_can_tell_as_many_samples_apart(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    sampled = importlib.import_module("bench._profile").Sampled
    n = sampled.rounds * sampled.repeat
    found = mannwhitneyu(range(n), range(n, 2 * n), method="exact")
    assert found.pvalue < 0.002  # asv's threshold


@pytest.mark.parametrize(
    ("profile", "chosen"), [(None, [1, 2]), ("quick", [1, 2]), ("full", [1, 2, 3])]
)
def test_the_full_profile_adds_to_the_quick_one(monkeypatch, profile, chosen):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delenv("CELLFEED_BENCH_PROFILE", raising=False)
    if profile is not None:
        monkeypatch.setenv("CELLFEED_BENCH_PROFILE", profile)
    parameters = importlib.import_module("bench._profile").parameters
    assert parameters(quick=[1, 2], full=[3]) == chosen


def test_an_unknown_profile_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("CELLFEED_BENCH_PROFILE", "fast")
    with pytest.raises(ValueError, match="one of quick, full, but got 'fast'"):
        importlib.import_module("bench._profile").parameters(quick=[1])
