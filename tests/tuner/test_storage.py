import os
import sys
from pathlib import Path

import pytest

from cellfeed_tuner._machine import _storage
from cellfeed_tuner._machine._storage import describe_storage

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
        assert _storage._kind(file_system) == kind

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
            _storage._Mount(mount_point=point, file_system="ext4", device=name)
            for point, name in rows
        ]
        found = _storage._mount_of(Path(path), mounts)
        assert found is not None
        assert found.device == device

    def test_no_table_of_mounts(self, tmp_path):
        assert _storage._mount_of(tmp_path, []) is None

    @linux_only
    def test_each_file_system_is_described_once(self, tmp_path):
        (tmp_path / "a").touch()
        storage = describe_storage([tmp_path / "a", tmp_path, Path("/proc/version")])
        assert len(storage) == 2
        assert (storage[1].mount_point, storage[1].file_system) == ("/proc", "proc")


class TestDisk:
    @staticmethod
    def plant(sys_root: Path, file: Path, folder: str) -> Path:
        """Lay out the /sys of a machine on which a file lies on the device in ``folder``."""
        number = file.stat().st_dev
        link = sys_root / f"dev/block/{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(parents=True)
        (sys_root / folder).mkdir(parents=True, exist_ok=True)
        link.symlink_to(sys_root / folder)
        return sys_root / folder

    def test_a_partition_leads_to_its_disk(self, tmp_path):
        partition = self.plant(tmp_path, tmp_path, "devices/sda/sda1")
        (partition / "partition").write_text("1\n")
        assert _storage._disk_folder(tmp_path, "", tmp_path) == tmp_path / "devices/sda"

    def test_a_mapped_device_leads_to_the_disk_below(self, tmp_path):
        mapped = self.plant(tmp_path, tmp_path, "devices/dm-0")
        (tmp_path / "devices/sda/sda2").mkdir(parents=True)
        (tmp_path / "devices/sda/sda2/partition").write_text("2\n")
        (mapped / "slaves").mkdir()
        (mapped / "slaves/sda2").symlink_to(tmp_path / "devices/sda/sda2")
        assert _storage._disk_folder(tmp_path, "", tmp_path) == tmp_path / "devices/sda"

    def test_an_array_of_disks_is_the_device(self, tmp_path):
        array = self.plant(tmp_path, tmp_path, "devices/md0")
        for name in ("sda", "sdb"):
            (array / "slaves" / name).mkdir(parents=True)
        assert _storage._disk_folder(tmp_path, "", tmp_path) == array

    def test_a_system_that_does_not_tell(self, tmp_path):
        assert _storage._disk_folder(tmp_path, "server:/export", tmp_path) is None

    @pytest.mark.parametrize(("text", "flag"), [("1\n", True), ("0\n", False), ("", None)])
    def test_rotational(self, tmp_path, text, flag):
        (tmp_path / "rotational").write_text(text)
        assert _storage._flag(tmp_path / "rotational") is flag
        assert _storage._flag(tmp_path / "absent") is None
