"""What is known of this machine, by other means."""

import importlib.metadata
import platform

import h5py
import numpy as np
import psutil

from cellfeed_tuner import describe_machine


def test_limits_of_control_groups_count(monkeypatch):
    assert describe_machine([]).memory.total_bytes == psutil.virtual_memory().total
    monkeypatch.setattr("cellfeed.machine.cpu_quota", lambda: 0.25)
    monkeypatch.setattr("cellfeed.machine.memory_headroom", lambda: 12345)
    described = describe_machine([])
    assert described.cpu.usable_cores == 0.25
    assert described.memory.available_bytes == 12345


def test_versions_are_those_that_run(monkeypatch):
    version = importlib.metadata.version
    there = {"h5py", "numpy", "cellfeed"}
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version(name if name in there else "no-such")
    )
    described = describe_machine([]).platform
    assert described.packages["hdf5"] == h5py.version.hdf5_version
    assert described.packages["numpy"] == np.__version__
    assert described.packages["cellfeed"] is not None
    assert described.packages["scipy"] is None
    assert described.python == platform.python_version()
    assert platform.release() in described.kernel


def test_what_decides_about_speed_is_read_from_the_system(monkeypatch, tmp_path):
    monkeypatch.setattr("cellfeed_tuner._machine._SYSTEM_FILES", tmp_path)
    assert describe_machine([]).cpu.frequency_governor is None
    assert describe_machine([]).cpu.numa_nodes is None
    for node in (0, 1, 10):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
    (tmp_path / "cpu/cpu0/cpufreq").mkdir(parents=True)
    (tmp_path / "cpu/cpu0/cpufreq/scaling_governor").write_text("powersave\n")
    cpu = describe_machine([]).cpu
    assert (cpu.frequency_governor, cpu.numa_nodes) == ("powersave", 3)
