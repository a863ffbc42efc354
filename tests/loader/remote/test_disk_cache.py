"""Remote bytes that are cached on disk. The oracle: a set of the ranges that were written."""

import logging
import os
import pickle
import shutil
import sqlite3
import threading
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed._bytes._remote import _disk_cache
from cellfeed._bytes._remote._disk_cache import DiskCache, ObjectVersion
from cellfeed.machine import cache_folder

PLENTY = 10**8


def content(url, etag, offset, size):
    """Return the bytes that the server has there."""
    return np.random.default_rng([*f"{url} {etag}".encode(), offset]).bytes(size)


def write(cache, ranges, url="https://host/a", etag="1"):
    version = ObjectVersion(url, etag, 10**9)
    cache.write([(version, each[0], content(url, etag, *each)) for each in ranges])


def found(cache, ranges, url="https://host/a", etag="1"):
    """Return for each range whether it is cached, after checking its bytes."""
    version = ObjectVersion(url, etag, 10**9)
    read = cache.read([(version, *each) for each in ranges])
    assert len(read) == len(ranges)
    for each, cached in zip(ranges, read, strict=True):
        assert cached is None or cached == content(url, etag, *each)
    return [cached is not None for cached in read]


def n_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def database_of(folder):
    return folder / "bytes" / "ranges.sqlite"


def age(folder, hours):
    """Let all ranges have been used so long ago."""
    if database_of(folder).exists():
        with closing(sqlite3.connect(database_of(folder))) as database, database:
            database.execute("UPDATE segments SET used = used - ?", (3600 * hours,))


def chunks(n, size=10_000, first=0):
    return [(number * size, size) for number in range(first, first + n)]


ranges_ = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3000)), max_size=12)
steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "read", "reopen", "age"]),
        st.sampled_from(["https://host/a", "https://host/b"]),
        st.sampled_from(["1", "2"]),
        ranges_,
    ),
    max_size=15,
)


@given(steps=steps, max_bytes=st.sampled_from([300, 5_000, 40_000, 200_000, PLENTY]))
def test_any_sequence_of_steps(new_folder, steps, max_bytes):
    folder, written = new_folder(), set()
    cache = DiskCache(max_bytes, folder)
    for step, url, etag, ranges in steps:
        if step == "write":
            write(cache, ranges, url, etag)
            written |= {(url, etag, *each) for each in ranges}
        elif step == "read":
            there = found(cache, ranges, url, etag)
            was = [(url, etag, *each) in written or each[1] == 0 for each in ranges]
            assert there == was if max_bytes == PLENTY else all(np.less_equal(there, was))
        elif step == "reopen":
            cache = DiskCache(max_bytes, folder)
        else:
            age(folder, 10)
        assert n_bytes(folder) <= max_bytes


def test_bytes_and_views(tmp_path):
    cache, version = DiskCache(PLENTY, tmp_path), ObjectVersion("a", "1", 100)
    cache.write([(version, 0, b"bytes"), (version, 1, memoryview(b"a view")[2:])])
    assert cache.read([(version, 0, 5), (version, 1, 4)]) == [b"bytes", b"view"]


@pytest.mark.parametrize("other", [("b", "1", 100), ("a", "2", 100), ("a", "1", 99)])
def test_another_identity_is_another_object(tmp_path, other):
    cache = DiskCache(PLENTY, tmp_path)
    one, another = ObjectVersion("a", "1", 100), ObjectVersion(*other)
    cache.write([(one, 5, b"abc")])
    assert cache.read([(another, 5, 3), (one, 5, 3)]) == [None, b"abc"]


def test_folder_is_that_of_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path))
    write(DiskCache(PLENTY), chunks(1))
    write(DiskCache(PLENTY, name="pages"), chunks(1))
    assert (cache_folder("bytes") / "ranges.sqlite").exists()
    assert (cache_folder("pages") / "ranges.sqlite").exists()


class TestTheBound:
    MOST = 4_000_000

    def test_more_than_fits_stays_as_it_is_however_often_it_is_read(self, tmp_path):
        cache, ranges = DiskCache(self.MOST, tmp_path), chunks(1000)
        there = list[list[bool]]()
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(1000)
            for some in np.split(order, 20):
                is_there = found(cache, [ranges[each] for each in some])
                missing = [ranges[n] for n, kept in zip(some, is_there, strict=True) if not kept]
                write(cache, missing)
                assert n_bytes(tmp_path) <= self.MOST
            there.append(found(cache, ranges))
        assert there[0] == there[1] == there[2]
        assert sum(there[0]) > 350

    def test_what_nobody_uses_makes_room(self, tmp_path):
        earlier, later = chunks(390), chunks(390, first=1000)
        write(DiskCache(self.MOST, tmp_path), earlier)
        cache = DiskCache(self.MOST, tmp_path)
        write(cache, later)
        assert sum(found(cache, later)) < 100
        age(tmp_path, 10)
        cache = DiskCache(self.MOST, tmp_path)
        write(cache, later)
        assert sum(found(cache, later)) > 350
        assert n_bytes(tmp_path) <= self.MOST

    def test_what_is_read_counts_as_used(self, tmp_path):
        write(DiskCache(self.MOST, tmp_path), chunks(390))
        age(tmp_path, 10)
        cache = DiskCache(self.MOST, tmp_path)
        before = found(cache, chunks(390))
        write(cache, chunks(390, first=1000))
        assert found(cache, chunks(390)) == before

    def test_what_has_been_replaced_goes_first(self, tmp_path):
        cache = DiskCache(self.MOST, tmp_path)
        write(cache, chunks(180), "https://host/b")
        write(cache, chunks(200))
        others = found(cache, chunks(180), "https://host/b")
        write(cache, chunks(200), etag="2")
        assert sum(found(cache, chunks(200), etag="2")) > 120
        assert sum(found(cache, chunks(180), "https://host/b")) >= sum(others) - 50
        assert n_bytes(tmp_path) <= self.MOST

    def test_a_lower_bound_holds_at_once(self, tmp_path):
        write(DiskCache(self.MOST, tmp_path), chunks(390))
        cache = DiskCache(self.MOST // 3, tmp_path)
        assert n_bytes(tmp_path) <= self.MOST // 3
        assert sum(found(cache, chunks(390))) > 50

    def test_a_higher_bound_keeps_what_is_there(self, tmp_path):
        write(DiskCache(self.MOST, tmp_path), chunks(350))
        cache = DiskCache(100 * self.MOST, tmp_path)
        write(cache, chunks(1000))
        assert all(found(cache, chunks(1000)))

    def test_ranges_larger_than_the_cache(self, tmp_path):
        cache, large = DiskCache(self.MOST, tmp_path), [(0, self.MOST // 2), (7, 2 * self.MOST)]
        write(cache, large)
        assert found(cache, large) == [True, False]

    def test_many_small_ranges(self, tmp_path):
        most = self.MOST // 4
        cache, ranges = DiskCache(most, tmp_path), chunks(500, size=10)
        write(cache, ranges)
        assert all(found(cache, ranges))
        write(cache, chunks(12_500, size=10))
        assert n_bytes(tmp_path) <= most


class TestDamage:
    @pytest.mark.parametrize("seed", range(40))
    def test_a_flipped_byte_is_noticed(self, tmp_path, seed):
        write(DiskCache(300_000, tmp_path), chunks(10))
        path = database_of(tmp_path)
        damaged = bytearray(path.read_bytes())
        place = np.random.default_rng(seed).integers(len(damaged) if seed % 2 else 20_000)
        damaged[place] ^= 1 << (seed % 8)
        path.write_bytes(damaged)
        cache = DiskCache(300_000, tmp_path)
        there = found(cache, chunks(10))
        write(cache, chunks(10))
        assert sum(found(cache, chunks(10))) >= sum(there)
        write(cache, chunks(3, first=20))
        found(cache, chunks(30))
        assert n_bytes(tmp_path) <= 300_000

    def test_a_damaged_range_is_cached_again(self, tmp_path):
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        damaged = bytearray(database_of(tmp_path).read_bytes())
        place = damaged.index(content("https://host/a", "1", 40_000, 10_000)[-1000:])
        damaged[place : place + 7] = b"damaged"
        database_of(tmp_path).write_bytes(damaged)
        assert found(cache, chunks(10)) == [number != 4 for number in range(10)]
        write(cache, chunks(10))
        assert all(found(cache, chunks(10)))

    @pytest.mark.parametrize("left", [0, 1, 100, 4096, 45_000, 100_000])
    def test_truncated_files(self, tmp_path, left):
        write(DiskCache(10**7, tmp_path), chunks(10))
        os.truncate(database_of(tmp_path), left)
        cache = DiskCache(10**7, tmp_path)
        assert not all(found(cache, chunks(10)))
        write(cache, chunks(20))
        write(cache, chunks(20))
        assert all(found(cache, chunks(20)))
        assert n_bytes(tmp_path) <= 10**7

    @pytest.mark.parametrize("name", [b"TABLE ranges", b"TABLE objects", b"id INTEGER PRIMARY"])
    def test_a_schema_that_is_no_text(self, tmp_path, name):
        """SQLite's message has the damaged name, which Python cannot decode."""
        opened = DiskCache(PLENTY, tmp_path)
        write(opened, chunks(10))
        path = database_of(tmp_path)
        path.write_bytes(path.read_bytes().replace(name, b"\xd5" * len(name)))
        for cache in (opened, DiskCache(PLENTY, tmp_path)):
            found(cache, chunks(10))
            write(cache, chunks(10))
            assert all(found(cache, chunks(10)))

    def test_a_database_of_something_else(self, tmp_path):
        database_of(tmp_path).parent.mkdir()
        with closing(sqlite3.connect(database_of(tmp_path))) as database, database:
            database.execute("CREATE TABLE others (id)")
        cache = DiskCache(PLENTY, tmp_path)
        assert not any(found(cache, chunks(10)))
        write(cache, chunks(10))
        assert all(found(cache, chunks(10)))

    def test_files_that_are_removed_while_they_are_used(self, tmp_path):
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        for path in (tmp_path / "bytes").iterdir():
            path.unlink()
        assert not any(found(cache, chunks(10)))
        write(cache, chunks(20))
        assert all(found(DiskCache(PLENTY, tmp_path), chunks(20)))


class TestWhereItDoesNotWork:
    def test_a_folder_that_cannot_be(self, tmp_path, caplog):
        (tmp_path / "bytes").write_text("a file")
        with caplog.at_level(logging.INFO):
            cache = DiskCache(PLENTY, tmp_path)
            for _ in range(3):
                write(cache, chunks(10))
                assert not any(found(cache, chunks(10)))
        (said,) = caplog.records
        assert said.levelno == logging.INFO
        assert "are not cached on disk" in said.getMessage()

    def test_the_last_of_a_disk_is_left_to_others(self, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(_disk_cache, "disk_usage", lambda folder: usage._replace(free=45_000))
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        assert not any(found(cache, chunks(10)))
        assert n_bytes(tmp_path) < 10_000

    def test_a_process_that_holds_the_lock_is_not_waited_for(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_disk_cache, "_LOCK_SECONDS", 0.01)
        monkeypatch.setattr(_disk_cache, "_BUSY_SECONDS", 0.0)
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        with closing(sqlite3.connect(database_of(tmp_path), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            write(cache, chunks(20))
            assert found(cache, chunks(20)) == [True] * 10 + [False] * 10
        write(cache, chunks(20))
        assert all(found(cache, chunks(20)))


def test_pickled(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, chunks(1))
    assert found(pickle.loads(pickle.dumps(cache)), chunks(1)) == [True]


def test_threads(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)

    def use(first):
        for number in range(10):
            write(cache, chunks(20, first=first + 10 * number))
            found(cache, chunks(200))

    threads = [threading.Thread(target=use, args=(each,)) for each in (0, 20, 40, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found(cache, chunks(170)))
