import mmap
import os
import sys
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from cellfeed_tuner._measuring._page_cache import (
    drop_clean_pages,
    drop_pages,
    load_pages,
    resident_fraction,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the page cache can be inspected on Linux only"
)

MIB = 1 << 20
WINDOW = 1 << 30
NOT_ON_DISK = {"tmpfs", "ramfs", "zfs", "9p"}


def file_system(folder: Path) -> str:
    """Tell the type of a file system by other means than the code under test."""
    rows = [
        row for row in psutil.disk_partitions(all=True) if folder.is_relative_to(row.mountpoint)
    ]
    return max(rows, key=lambda row: len(row.mountpoint)).fstype


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if (kind := file_system(tmp_path.resolve())) in NOT_ON_DISK:
        pytest.skip(f"the page cache cannot be emptied of files on {kind}, where tmp_path lies")
    return tmp_path


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "data"
    path.write_bytes(os.urandom(3 * MIB + 1234))
    return path


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Run as a user who owns none of the system's files."""
    euid = os.geteuid()
    if euid == 0:
        os.seteuid(65534)
    yield
    os.seteuid(euid)


def test_a_file_just_written_is_resident(file):
    assert resident_fraction([file]) == 1


@pytest.mark.parametrize("drop", [drop_pages, partial(drop_clean_pages, mapped=True)])
def test_dropping_takes_pages_that_are_mapped(file, drop):
    drop_pages([file])
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
        content = m[:]
        assert resident_fraction([file]) == 1
        drop([file])
        assert resident_fraction([file]) == 0
        assert m[:] == content == file.read_bytes()


def test_what_is_written_to_a_mapping_is_not_lost(file):
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as m:
        m[:4] = b"mine"
        drop_clean_pages([file], mapped=True)
        assert m[:4] == b"mine"


def test_dropping_takes_dirty_pages_too(file):
    drop_pages([file])
    assert resident_fraction([file]) == 0


def test_loading_fills_what_dropping_emptied(file):
    drop_pages([file])
    load_pages([file])
    assert resident_fraction([file]) == 1


def test_looking_does_not_load(file):
    drop_pages([file])
    assert [resident_fraction([file]) for _ in range(3)] == [0, 0, 0]


def test_the_share_is_of_bytes_over_all_files(folder):
    cold, warm = folder / "cold", folder / "warm"
    cold.write_bytes(bytes(3 * MIB))
    warm.write_bytes(bytes(MIB))
    drop_pages([cold])
    assert resident_fraction([cold, warm]) == 0.25


def test_bytes_beyond_the_first_window_are_counted_exactly(folder):
    path = folder / "sparse"
    with path.open("wb") as out:
        out.seek(WINDOW)
        out.write(b"x" * 5000)  # not a whole number of pages
    assert resident_fraction([path]) == 5000 / (WINDOW + 5000)


def test_memory_does_not_grow_with_the_file(folder):
    path = folder / "sparse"
    with path.open("wb") as out:
        out.truncate(6 * WINDOW)
    resident_fraction([path])  # what the first call allocates once and for all
    tracemalloc.start()
    resident_fraction([path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert WINDOW // mmap.PAGESIZE < peak < MIB


def test_an_empty_file_has_no_share(folder):
    path = folder / "empty"
    path.touch()
    drop_pages([path])
    assert resident_fraction([path]) is None
    assert resident_fraction([]) is None


def test_an_empty_file_beside_others_changes_nothing(file):
    empty = file.with_name("empty")
    empty.touch()
    assert resident_fraction([empty, file]) == 1


@pytest.mark.usefixtures("ordinary_user")
def test_the_kernel_does_not_tell_about_files_of_others():
    file = Path("/etc/passwd")
    drop_pages([file])
    assert resident_fraction([file]) is None


def test_all_of_each_file_is_loaded(folder):
    sizes = {"a": 20 * MIB + 5, "b": 0, "c": 7}
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    paths = [folder / name for name in sizes]
    drop_pages(paths)
    load_pages(paths)
    assert resident_fraction(paths) == 1


@pytest.mark.parametrize("function", [drop_pages, resident_fraction, load_pages])
def test_a_missing_file_is_an_error(function, tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        function([tmp_path / "absent"])
