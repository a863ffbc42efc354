import json
import os
import platform
import sys

import h5py
import numpy as np
import psutil
import pytest

from cellfeed import ParameterError
from cellfeed_tuner import _machine
from cellfeed_tuner._machine import (
    Cpu,
    Machine,
    Memory,
    Packages,
    Platform,
    describe_machine,
    usable_cpu_count,
    usable_memory_bytes,
)
from cellfeed_tuner._storage import Storage

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


class TestJson:
    def test_survives_a_round_trip(self, tmp_path):
        path = tmp_path / "data"
        path.write_bytes(os.urandom(8 << 20))
        record = describe_machine([path], storage_seconds=0.05).to_json()
        assert json.loads(json.dumps(record, allow_nan=False)) == record

    def test_what_is_not_known_says_so(self):
        nothing = Storage(
            mount_point=None,
            file_system=None,
            kind=None,
            device=None,
            rotational=None,
            model=None,
            sequential=None,
            random=None,
            note="why",
        )
        versions = Packages(
            cellfeed="1", anndata=None, h5py="3", hdf5="2", numpy="2", scipy="1", torch=None
        )
        machine = Machine(
            cpu=Cpu(model=None, logical_cores=4, usable_cores=1.5),
            memory=Memory(total_bytes=10, available_bytes=5),
            storage=(nothing,),
            platform=Platform(
                system=None, kernel="Linux 6", architecture="x", python="3.11", packages=versions
            ),
        )
        fields = ["mount_point", "file_system", "kind", "device", "rotational", "model"]
        fields += ["sequential", "random"]
        assert machine.to_json() == {
            "cpu": {"model": "unknown", "logical_cores": 4, "usable_cores": 1.5},
            "memory": {"total_bytes": 10, "available_bytes": 5},
            "storage": [dict.fromkeys(fields, "unknown") | {"note": "why"}],
            "platform": {
                "system": "unknown",
                "kernel": "Linux 6",
                "architecture": "x",
                "python": "3.11",
                "packages": {
                    "cellfeed": "1",
                    "anndata": "unknown",
                    "h5py": "3",
                    "hdf5": "2",
                    "numpy": "2",
                    "scipy": "1",
                    "torch": "unknown",
                },
            },
        }


class TestCpu:
    @linux_only
    def test_affinity_counts(self):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})
        try:
            assert usable_cpu_count() == 1
            assert describe_machine([]).cpu.usable_cores <= 1
        finally:
            os.sched_setaffinity(0, allowed)

    def test_a_quota_below_one_core_still_counts_one(self, monkeypatch):
        monkeypatch.setattr(_machine, "cpu_quota", lambda: 0.25)
        assert describe_machine([]).cpu.usable_cores == 0.25
        assert usable_cpu_count() == 1

    def test_a_quota_above_the_machine_changes_nothing(self, monkeypatch):
        monkeypatch.setattr(_machine, "cpu_quota", lambda: None)
        unlimited = describe_machine([]).cpu
        monkeypatch.setattr(_machine, "cpu_quota", lambda: 1e6)
        assert describe_machine([]).cpu == unlimited
        assert unlimited.usable_cores == usable_cpu_count()

    @linux_only
    def test_a_quota_is_rounded_down_to_whole_cores(self, monkeypatch):
        monkeypatch.setattr(_machine, "cpu_quota", lambda: 3.9)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
        assert usable_cpu_count() == 3


class TestMemory:
    def test_the_total_is_the_machines(self):
        assert describe_machine([]).memory.total_bytes == psutil.virtual_memory().total

    def test_the_lower_of_machine_and_control_group(self, monkeypatch):
        monkeypatch.setattr(_machine, "memory_headroom", lambda: 12345)
        assert usable_memory_bytes() == 12345
        assert describe_machine([]).memory.available_bytes == 12345
        monkeypatch.setattr(_machine, "memory_headroom", lambda: 1 << 60)
        assert 12345 < usable_memory_bytes() < psutil.virtual_memory().total


class TestPlatform:
    def test_versions_are_those_that_run(self):
        described = describe_machine([]).platform
        assert described.packages.hdf5 == h5py.version.hdf5_version
        assert described.packages.numpy == np.__version__
        assert described.packages.cellfeed is not None
        assert described.python == platform.python_version()
        assert platform.release() in described.kernel

    def test_a_package_that_is_not_installed(self):
        assert _machine._version("no-such-distribution-as-this") is None


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_storage_seconds_that_are_none(seconds):
    with pytest.raises(ParameterError, match=r"storage_seconds >= 0.*storage_seconds="):
        describe_machine([], storage_seconds=seconds)
