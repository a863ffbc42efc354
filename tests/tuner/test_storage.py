import sys
from pathlib import Path

import pytest

from cellfeed_tuner import _machine
from cellfeed_tuner._machine import Storage, describe_storage

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


class TestFileSystem:
    @pytest.mark.parametrize(
        ("file_system", "kind"),
        [
            ("ext4", "local"),
            ("xfs", "local"),
            ("fuseblk", "local"),
            ("tmpfs", "memory"),
            ("nfs4", "network"),
            ("lustre", "network"),
            ("fuse.sshfs", "network"),
        ],
    )
    def test_kind(self, file_system, kind):
        assert _machine._kind(file_system) == kind

    @pytest.mark.parametrize(
        ("path", "device"),
        [
            ("/other/file", "root"),
            ("/data/file", "hides"),
            ("/data/deep/file", "inner"),
            ("/data2/file", "root"),
        ],
    )
    def test_the_innermost_and_last_mount_counts(self, path, device):
        rows = [
            ("/", "root"),
            ("/data", "hidden"),
            ("/data/deep", "inner"),
            ("/data", "hides"),
        ]
        mounts = [
            Storage(mount_point=point, file_system="ext4", kind="local", device=name)
            for point, name in rows
        ]
        assert _machine._storage_of(Path(path), mounts).device == device

    def test_no_table_of_mounts(self, tmp_path):
        assert _machine._storage_of(tmp_path, []).file_system is None

    @linux_only
    def test_each_file_system_is_described_once(self, tmp_path):
        (tmp_path / "a").touch()
        storage = describe_storage([tmp_path / "a", tmp_path, Path("/proc/version")])
        assert len(storage) == 2
        assert (storage[1].mount_point, storage[1].file_system) == ("/proc", "proc")
