import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from cellfeed_tuner._machine import _storage
from cellfeed_tuner._machine._page_cache import resident_fraction
from cellfeed_tuner._machine._storage import ReadSpeed, Storage, describe_storage

MIB = 1 << 20
SLOT = 64 << 10
NOT_ON_DISK = {"tmpfs", "ramfs", "zfs", "9p"}
LONG = 60.0  # seconds; the files are read to their ends long before

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if sys.platform != "linux":
        pytest.skip("the page cache can be emptied on Linux only")
    rows = [
        row for row in psutil.disk_partitions(all=True) if tmp_path.is_relative_to(row.mountpoint)
    ]
    if (kind := max(rows, key=lambda row: len(row.mountpoint)).fstype) in NOT_ON_DISK:
        pytest.skip(f"the page cache cannot be emptied of files on {kind}, where tmp_path lies")
    return tmp_path


def written(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(size))
    return path


def storage_of(paths: list[Path], seconds: float) -> Storage:
    (storage,) = describe_storage(paths, seconds)
    return storage


def speeds_of(paths: list[Path], seconds: float) -> tuple[ReadSpeed, ReadSpeed]:
    storage = storage_of(paths, seconds)
    assert storage.note == ""
    assert storage.sequential is not None
    assert storage.random is not None
    return storage.sequential, storage.random


class TestReadSpeed:
    def test_each_half_is_read_once(self, folder):
        path = written(folder / "data", 9 * MIB)
        sequential, random = speeds_of([path], LONG)
        assert sequential.bytes_read == random.bytes_read == 4.5 * MIB
        assert sequential.bytes_per_second == sequential.bytes_read / sequential.seconds
        assert random.bytes_per_second == random.bytes_read / random.seconds

    def test_the_files_are_read_and_nothing_else(self, folder):
        path = written(folder / "data", 8 * MIB)
        assert speeds_of([path], LONG)[0].bytes_read == 4 * MIB
        assert resident_fraction([path]) == 1

    def test_several_files_one_given_twice_one_tiny(self, folder):
        paths = [written(folder / name, 3 * MIB) for name in "ab"]
        tiny = written(folder / "tiny", 100)
        sequential, random = speeds_of([*paths, tiny, paths[0]], LONG)
        assert sequential.bytes_read == random.bytes_read == 3 * MIB

    def test_time_bounds_the_reads(self, folder):
        sequential, random = speeds_of([written(folder / "data", 40 * MIB)], 1e-9)
        assert sequential.bytes_read == 8 * MIB
        assert random.bytes_read == SLOT

    def test_small_files_give_no_speed(self, folder):
        storage = storage_of([written(folder / "data", 4 * MIB - 1)], LONG)
        assert (storage.sequential, storage.random) == (None, None)
        assert storage.note == "the files hold less than 4 MiB"

    def test_the_files_may_be_absent(self, tmp_path):
        storage = storage_of([tmp_path / "absent"], LONG)
        assert (storage.sequential, storage.random) == (None, None)
        assert storage.note == "the files hold less than 4 MiB"

    def test_zero_seconds_measure_nothing(self, tmp_path):
        storage = storage_of([written(tmp_path / "data", 8 * MIB)], 0)
        assert (storage.sequential, storage.random) == (None, None)
        assert storage.note == "not measured, as asked"

    @linux_only
    def test_files_in_memory_give_no_speed(self):
        shm = Path("/dev/shm")
        rows = [row for row in psutil.disk_partitions(all=True) if row.mountpoint == str(shm)]
        if not rows or rows[-1].fstype != "tmpfs" or not os.access(shm, os.W_OK):
            pytest.skip("no tmpfs is mounted on /dev/shm that this user may write to")
        path = shm / f"cellfeed-test-{os.getpid()}"
        try:
            storage = storage_of([written(path, 5 * MIB)], 0.1)
        finally:
            path.unlink(missing_ok=True)
        assert (storage.kind, storage.file_system) == ("memory", "tmpfs")
        assert (storage.sequential, storage.random) == (None, None)
        assert "could not be dropped" in storage.note

    def test_a_file_that_may_not_be_read(self, folder):
        path = written(folder / "data", 5 * MIB)
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read everything")
        storage = storage_of([path], LONG)
        assert storage.note == "the files cannot be read: Permission denied"


class TestReads:
    @pytest.fixture
    def slots(self):
        return _storage._Slots(fds=(7, 8, 9), ends=(5, 5, 200))

    def test_halves_share_no_byte_and_leave_none(self, slots):
        reads = [*_storage._random_reads(slots), *_storage._sequential_reads(slots)]
        touched = {fd: np.zeros(size, int) for fd, size in ((7, 5 * SLOT), (9, 195 * SLOT))}
        for read in reads:
            touched[read.fd][read.offset : read.offset + read.length] += 1
        assert all((counts == 1).all() for counts in touched.values())

    def test_random_reads_are_aligned_and_out_of_order(self, slots):
        offsets = [read.offset for read in _storage._random_reads(slots)]
        assert all(offset % SLOT == 0 for offset in offsets)
        assert offsets != sorted(offsets)

    def test_random_reads_are_the_same_every_time(self, slots):
        assert [*_storage._random_reads(slots)] == [*_storage._random_reads(slots)]

    def test_a_huge_file_takes_a_bounded_number_of_random_reads(self):
        slots = _storage._Slots(fds=(3,), ends=(10**8,))
        reads = [*_storage._random_reads(slots)]
        assert len({read.offset for read in reads}) == len(reads) == 1 << 16


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
        storage = describe_storage([tmp_path / "a", tmp_path, Path("/proc/version")], 0)
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
