import os
import sys

import psutil
import pytest

from cellfeed import machine

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
