"""The page cache of files: emptied, filled and looked at; and files that leave nothing in it."""

import mmap
import os
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from cellfeed import ParameterError, open_collection
from cellfeed_tuner import Configuration, autotune, measure
from cellfeed_tuner._measuring import _page_cache
from cellfeed_tuner._measuring._page_cache import (
    drop_clean_pages,
    drop_pages,
    load_pages,
    resident_fraction,
)

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="the page cache can be inspected on Linux only"
)

MIB = 1 << 20
WINDOW = 1 << 30


@pytest.fixture
def folder(tmp_path):
    # The type of the file system, by other means than the code under test.
    there = [
        row
        for row in psutil.disk_partitions(all=True)
        if tmp_path.resolve().is_relative_to(row.mountpoint)
    ]
    kind = max(there, key=lambda row: len(row.mountpoint)).fstype
    if kind in {"tmpfs", "ramfs", "zfs", "9p"}:
        pytest.skip(f"the page cache cannot be emptied of files on {kind}, where tmp_path lies")
    return tmp_path


@pytest.fixture
def file(folder):
    path = folder / "data"
    path.write_bytes(os.urandom(3 * MIB + 1234))
    return path


@linux_only
def test_pages_are_dropped_dirty_or_not_and_loaded_and_looking_does_neither(file):
    assert resident_fraction([file]) == 1  # it was just written
    drop_pages([file])
    assert [resident_fraction([file]) for _ in range(3)] == [0, 0, 0]
    load_pages([file])
    assert resident_fraction([file]) == 1


@linux_only
@pytest.mark.parametrize("drop", [drop_pages, partial(drop_clean_pages, mapped=True)])
def test_dropping_takes_pages_that_are_mapped(file, drop):
    drop_pages([file])
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
        content = m[:]
        assert resident_fraction([file]) == 1
        drop([file])
        assert resident_fraction([file]) == 0
        assert m[:] == content == file.read_bytes()


@linux_only
def test_what_is_written_to_a_mapping_is_not_lost(file):
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as m:
        m[:4] = b"mine"
        drop_clean_pages([file], mapped=True)
        assert m[:4] == b"mine"


@linux_only
def test_the_share_is_of_bytes_over_all_files(folder):
    cold, warm, empty = folder / "cold", folder / "warm", folder / "empty"
    for path, n_bytes in ((cold, 3 * MIB), (warm, MIB), (empty, 0)):
        path.write_bytes(bytes(n_bytes))
    drop_pages([cold, empty])
    assert resident_fraction([cold, empty, warm]) == 0.25
    assert resident_fraction([empty]) is None
    assert resident_fraction([]) is None
    load_pages([cold, empty])
    assert resident_fraction([empty, cold, warm]) == 1


@linux_only
def test_a_large_file_is_looked_at_in_windows_to_its_last_byte(folder, monkeypatch):
    path = folder / "sparse"
    with path.open("wb") as out:
        out.seek(WINDOW)
        out.write(b"x" * 5000)  # not a whole number of pages
    assert resident_fraction([path]) == 5000 / (WINDOW + 5000)
    # Memory does not grow with the file.
    lengths = list[int]()
    with path.open("r+b") as out:
        out.truncate(6 * WINDOW)

    class Mapping(mmap.mmap):
        def __new__(cls, fileno, length, *arguments, **options):
            lengths.append(length)
            return super().__new__(cls, fileno, length, *arguments, **options)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    assert resident_fraction([path]) == 2 * mmap.PAGESIZE / (6 * WINDOW)
    assert lengths == [WINDOW] * 6


@linux_only
def test_all_of_each_file_is_loaded(folder):
    path = folder / "long"
    path.write_bytes(bytes(20 * MIB + 5))
    drop_pages([path])
    load_pages([path])
    assert resident_fraction([path]) == 1


@linux_only
def test_the_kernel_does_not_tell_about_files_of_others():
    file, euid = Path("/etc/passwd"), os.geteuid()
    if euid == 0:
        os.seteuid(65534)
    try:
        drop_pages([file])
        assert resident_fraction([file]) is None
    finally:
        os.seteuid(euid)


@linux_only
@pytest.mark.parametrize("function", [drop_pages, resident_fraction, load_pages])
def test_a_missing_file_is_an_error(function, tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        function([tmp_path / "absent"])


def test_files_that_do_not_fit_in_memory_are_not_measured_warm(small_collection, monkeypatch):
    collection = open_collection(small_collection, obs=["plate"])
    monkeypatch.setattr(_page_cache, "usable_memory_bytes", lambda: 1000)
    for measuring in (
        lambda: measure(collection, Configuration(block_size=4), cache="warm"),
        lambda: autotune(collection, label="plate", cache="warm", memory=10**9),
    ):
        with pytest.raises(ParameterError, match="needs the files in memory, but they have"):
            measuring()
