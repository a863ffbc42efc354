import platform
import sys

import h5py
import numpy as np
import psutil
import pytest

from cellfeed_tuner import describe_machine
from cellfeed_tuner._machine import package_version

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


class TestCpu:
    def test_a_quota_counts(self, monkeypatch):
        monkeypatch.setattr("cellfeed.machine.cpu_quota", lambda: 0.25)
        assert describe_machine([]).cpu.usable_cores == 0.25


class TestMemory:
    def test_the_total_is_the_machines(self):
        assert describe_machine([]).memory.total_bytes == psutil.virtual_memory().total

    def test_what_control_groups_leave_counts(self, monkeypatch):
        monkeypatch.setattr("cellfeed.machine.memory_headroom", lambda: 12345)
        assert describe_machine([]).memory.available_bytes == 12345


class TestPlatform:
    def test_versions_are_those_that_run(self):
        described = describe_machine([]).platform
        assert described.packages["hdf5"] == h5py.version.hdf5_version
        assert described.packages["numpy"] == np.__version__
        assert described.packages["cellfeed"] is not None
        assert described.python == platform.python_version()
        assert platform.release() in described.kernel

    def test_a_package_that_is_not_installed(self):
        assert package_version("no-such-distribution-as-this") is None
