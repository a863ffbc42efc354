"""Processors and memory of this process: affinity, and limits of control groups in a file tree."""

import os
import sys
import tempfile
from pathlib import Path, PurePosixPath

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import machine
from cellfeed.machine import cpu_quota, memory_headroom

V2 = "sys/fs/cgroup"
V1_CPU = "sys/fs/cgroup/cpu,cpuacct"
V1_MEMORY = "sys/fs/cgroup/memory"
V1_UNLIMITED = 9223372036854771712


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v2(path: str, files: dict[str, str]) -> dict[str, str]:
    """The files of a process in this group of the v2 hierarchy, and those below its mount."""
    below_mount = {f"{V2}/{name}": text for name, text in files.items()}
    return {
        "proc/self/cgroup": f"0::{path}",
        f"{V2}/cgroup.controllers": "cpu memory",
    } | below_mount


def v1(path: str, files: dict[str, str]) -> dict[str, str]:
    lines = f"9:name=systemd:{path}\n4:memory:{path}\n3:cpuset:/\n2:cpu,cpuacct:{path}"
    return {"proc/self/cgroup": lines} | files


def v1_quota(folder: str, quota: int) -> dict[str, str]:
    return {
        f"{folder}/cpu.cfs_quota_us": f"{quota}",
        f"{folder}/cpu.cfs_period_us": "100000",
    }


def v1_memory(folder: str, limit: int, usage: int) -> dict[str, str]:
    return {
        f"{V1_MEMORY}{folder}/memory.limit_in_bytes": f"{limit}",
        f"{V1_MEMORY}{folder}/memory.usage_in_bytes": f"{usage}",
    }


QUOTAS = {
    "a neighbour and a child do not count": (
        v2(
            "/a",
            {
                "a/cpu.max": "400000 100000",
                "a/child/cpu.max": "100000 100000",
                "b/cpu.max": "100000 100000",
            },
        ),
        4,
    ),
    "v1 with a shared mount": (v1("/job", v1_quota(f"{V1_CPU}/job", 250_000)), 2.5),
    "v1 below an unlimited group": (
        v1("/a/b", v1_quota(f"{V1_CPU}/a", 50_000) | v1_quota(f"{V1_CPU}/a/b", -1)),
        0.5,
    ),
    "v1 without a limit": (v1("/job", v1_quota(f"{V1_CPU}/job", -1)), None),
    "cpuset is not cpu": (v1("/", v1_quota("sys/fs/cgroup/cpuset", 100_000)), None),
    "the tighter hierarchy of two": (
        {
            "proc/self/cgroup": "2:cpu,cpuacct:/a\n0::/b",
            f"{V2}/unified/cgroup.controllers": "",
            f"{V2}/unified/b/cpu.max": "600000 100000",
        }
        | v1_quota(f"{V1_CPU}/a", 800_000),
        6,
    ),
    "a container that sees the path of its host": (
        v2("/docker/0123abcd", {"cpu.max": "350000 100000", "docker/cpu.max": "100000 100000"}),
        3.5,
    ),
    "a path that leads out of the mount": (
        v2("/../elsewhere", {"cpu.max": "700000 100000"})
        | {"sys/fs/elsewhere/cpu.max": "100000 100000"},
        7,
    ),
    "a path with a colon": (
        v2("/pod:1", {"pod:1/cpu.max": "200000 100000", "cpu.max": "900000 100000"}),
        2,
    ),
    **{
        f"no quota: {text!r}": (v2("/job", {"job/cpu.max": text}), None)
        for text in ("", "max", "garbage", "1 2 3", "100000 ")
    },
    "no control groups": ({}, None),
    "no mount": (v1("/job", {}), None),
}
HEADROOMS = {
    "v1 counts the cache of the whole group": (
        v1(
            "/job",
            v1_memory("/job", 1000, 900)
            | {
                f"{V1_MEMORY}/job/memory.stat": (
                    "inactive_file 1\nactive_file 2\ntotal_inactive_file 300\ntotal_active_file 400"
                )
            },
        ),
        800,
    ),
    "v1 without a limit": (v1("/job", v1_memory("/job", V1_UNLIMITED, 900)), None),
    "v1 with the limit of a parent": (
        v1(
            "/slurm/step",
            v1_memory("/slurm", 2000, 500) | v1_memory("/slurm/step", V1_UNLIMITED, 400),
        ),
        1500,
    ),
    "v1 in a container that sees the path of its host": (
        v1("/docker/0123abcd", v1_memory("", 2000, 500)),
        1500,
    ),
    "no control groups": ({}, None),
}


@pytest.mark.parametrize(("files", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_quota_of_processors(tmp_path, files, expected):
    assert cpu_quota(plant(tmp_path, files)) == expected


@pytest.mark.parametrize(("files", "expected"), HEADROOMS.values(), ids=HEADROOMS)
def test_headroom_of_memory(tmp_path, files, expected):
    assert memory_headroom(plant(tmp_path, files)) == expected


NUMBERS = st.integers(0, 2000)
LEVELS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "cpu.max": st.tuples(st.integers(1_000, 10**7) | st.just("max"), st.integers(1, 10**6)),
            "memory.max": NUMBERS | st.just("max"),
            "memory.high": NUMBERS | st.just("max"),
            "memory.current": NUMBERS,
            "memory.stat": st.tuples(NUMBERS, NUMBERS),
        },
    ),
    min_size=1,
    max_size=4,
)


@given(LEVELS)
def test_the_tightest_limit_along_the_path_counts(levels):
    """At any level of v2, with files that are not there. Cached file pages are free memory."""
    files, quotas, free = {f"{'g/' * (len(levels) - 1)}marker": ""}, [], []
    for depth, level in enumerate(levels):
        folder = "g/" * depth
        quota, period = level.pop("cpu.max", ("max", 1))
        quotas += [] if quota == "max" else [quota / period]
        cached = level.pop("memory.stat", (0, 0))
        stat = "anon 50\nfile 900\ninactive_file {}\nactive_file {}\nshmem 100".format(*cached)
        level |= {"cpu.max": f"{quota} {period}", "memory.stat": stat}
        files |= {f"{folder}{name}": f"{value}" for name, value in level.items()}
        limits = [level.get(name, "max") for name in ("memory.max", "memory.high")]
        held = max(0, level.get("memory.current", 0) - sum(cached))
        free += [max(0, limit - held) for limit in limits if limit != "max"]
    with tempfile.TemporaryDirectory() as folder:
        path = PurePosixPath("/", *["g"] * (len(levels) - 1))
        root = plant(Path(folder), v2(f"{path}", files))
        assert cpu_quota(root) == min(quotas, default=None)
        assert memory_headroom(root) == min(free, default=None)


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@linux_only
def test_affinity_counts():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert machine.usable_cpu_count() == 1
        assert machine.usable_cores() <= 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_quota_below_one_core_still_counts_one(monkeypatch):
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.25)
    assert machine.usable_cores() == 0.25
    assert machine.usable_cpu_count() == 1


def test_a_quota_above_the_machine_changes_nothing(monkeypatch):
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    unlimited = machine.usable_cores()
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1e6)
    assert machine.usable_cores() == unlimited == machine.usable_cpu_count()


@linux_only
def test_a_quota_is_rounded_down_to_whole_cores(monkeypatch):
    monkeypatch.setattr(machine, "cpu_quota", lambda: 3.9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert machine.usable_cpu_count() == 3


def test_memory_is_the_lower_of_machine_and_control_group(monkeypatch):
    monkeypatch.setattr(machine, "memory_headroom", lambda: 12345)
    assert machine.usable_memory_bytes() == 12345
    monkeypatch.setattr(machine, "memory_headroom", lambda: 1 << 60)
    assert 12345 < machine.usable_memory_bytes() < psutil.virtual_memory().total


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 8.0)


@pytest.mark.parametrize(
    ("ranks", "n_processes", "threads"),
    [("1", 1, 8), ("2", 1, 4), ("4", 2, 1), ("8", 1, 1), ("64", 1, 1), (" 2 ", 1, 4)],
)
def test_ranks_of_one_machine_share_its_threads(
    monkeypatch, eight_cores, ranks, n_processes, threads
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert machine.threads_per_process(n_processes) == threads


@pytest.mark.parametrize(
    "nonsense", [None, "", "0", "-2", "2.0", "two", "1e3", "\N{SUPERSCRIPT TWO}", "9" * 5000]
)
def test_a_number_of_ranks_that_is_none_changes_nothing(monkeypatch, eight_cores, nonsense):
    if nonsense is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", nonsense)
    assert machine.local_world_size() == 1
    assert machine.threads_per_process(2) == 4
