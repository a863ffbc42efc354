import json
import platform
import sys

import h5py
import numpy as np
import psutil
import pytest

from cellfeed_tuner._machine._description import (
    Cpu,
    Machine,
    Memory,
    Packages,
    Platform,
    describe_machine,
    package_version,
)
from cellfeed_tuner._machine._storage import Storage

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


class TestJson:
    def test_survives_a_round_trip(self, tmp_path):
        path = tmp_path / "data"
        path.touch()
        record = describe_machine([path]).to_json()
        assert json.loads(json.dumps(record, allow_nan=False)) == record

    def test_what_is_not_known_says_so(self):
        nothing = Storage(
            mount_point=None,
            file_system=None,
            kind=None,
            device=None,
            rotational=None,
            model=None,
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
        assert machine.to_json() == {
            "cpu": {"model": "unknown", "logical_cores": 4, "usable_cores": 1.5},
            "memory": {"total_bytes": 10, "available_bytes": 5},
            "storage": [dict.fromkeys(fields, "unknown")],
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
        assert described.packages.hdf5 == h5py.version.hdf5_version
        assert described.packages.numpy == np.__version__
        assert described.packages.cellfeed is not None
        assert described.python == platform.python_version()
        assert platform.release() in described.kernel

    def test_a_package_that_is_not_installed(self):
        assert package_version("no-such-distribution-as-this") is None
