"""Remote bytes that are kept on disk. The oracle: a dictionary of what was written."""

import fcntl
import logging
import os
import pickle
import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import _mapping
from cellfeed._bytes._remote import _disk_cache, _segments
from cellfeed._bytes._remote._disk_cache import DiskCache
from cellfeed.machine import cache_folder

PLENTY = 10**8


def content(url, etag, offset, size):
    """Return the bytes that the server has there."""
    return np.random.default_rng([*f"{url} {etag}".encode(), offset]).bytes(size)


def write(cache, ranges, url="https://host/a", etag="1"):
    offsets = np.array([offset for offset, _ in ranges], np.int64)
    cache.object(url, etag, 10**9).write(offsets, [content(url, etag, *each) for each in ranges])


def found(cache, ranges, url="https://host/a", etag="1"):
    """Return for each range whether it is there, once what is there is what was written."""
    offsets, sizes = np.array(ranges, np.int64).reshape(-1, 2).T
    read = cache.object(url, etag, 10**9).read(np.ascontiguousarray(offsets), sizes.copy())
    assert len(read) == len(ranges)
    for each, kept in zip(ranges, read, strict=True):
        assert kept is None or kept == content(url, etag, *each)
    return [kept is not None for kept in read]


def n_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def age(folder, hours):
    for path in folder.rglob("*.segment"):
        then = time.time() - 3600 * hours
        os.utime(path, (then, then))


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


def test_buffers_of_any_kind(tmp_path):
    kept = DiskCache(PLENTY, tmp_path).object("a", "1", 100)
    assert kept is not None
    array = np.arange(20, dtype=np.uint8)
    kept.write(np.arange(4), [b"bytes", memoryview(b"a view")[2:], array[:7], array[::2]])
    assert kept.read(np.arange(4), np.array([5, 4, 7, 10])) == [
        b"bytes",
        b"view",
        array[:7].tobytes(),
        array[::2].tobytes(),
    ]


def test_what_has_no_etag_is_not_kept(tmp_path):
    assert DiskCache(PLENTY, tmp_path).object("a", None, 100) is None


@pytest.mark.parametrize("other", [("b", "1", 100), ("a", "2", 100), ("a", "1", 99)])
def test_another_identity_is_another_object(tmp_path, other):
    cache = DiskCache(PLENTY, tmp_path)
    one, another = cache.object("a", "1", 100), cache.object(*other)
    assert one is not None
    assert another is not None
    one.write(np.array([5]), [b"abc"])
    assert another.read(np.array([5]), np.array([3])) == [None]
    assert one.read(np.array([5]), np.array([3])) == [b"abc"]


def test_folder_is_that_of_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path))
    write(DiskCache(PLENTY), chunks(1))
    write(DiskCache(PLENTY, name="pages"), chunks(1))
    assert (cache_folder("bytes") / "index").exists()
    assert (cache_folder("pages") / "index").exists()


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

    def test_ranges_larger_than_a_segment(self, tmp_path):
        cache, large = DiskCache(self.MOST, tmp_path), [(0, self.MOST // 2), (7, 2 * self.MOST)]
        write(cache, large)
        assert found(cache, large) == [True, False]

    def test_small_ranges_than_the_index_has_slots_for(self, tmp_path):
        cache, ranges = DiskCache(self.MOST, tmp_path), chunks(2000, size=10)
        for _ in range(3):
            write(cache, ranges)
        assert 0 < sum(found(cache, ranges)) < 2000
        assert sum(path.stat().st_size for path in tmp_path.rglob("*")) <= self.MOST


class TestDamage:
    @pytest.mark.parametrize("seed", range(20))
    def test_a_flipped_byte_is_noticed(self, tmp_path, seed):
        write(DiskCache(200_000, tmp_path), chunks(10))
        path = min(tmp_path.rglob("*.segment" if seed % 2 else "index"))
        damaged = bytearray(path.read_bytes())
        place = np.random.default_rng(seed).integers(20_000 if seed % 2 else len(damaged))
        damaged[place] ^= 1 << (seed % 8)
        path.write_bytes(damaged)
        cache = DiskCache(200_000, tmp_path)
        there = found(cache, chunks(10))
        assert not (seed % 2 and all(there))
        write(cache, chunks(10))
        assert sum(found(cache, chunks(10))) >= sum(there)
        write(cache, chunks(3, first=20))
        found(cache, chunks(30))
        assert n_bytes(tmp_path) <= 200_000

    def test_what_was_damaged_is_kept_again(self, tmp_path):
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        (segment,) = tmp_path.rglob("*.segment")
        with segment.open("r+b") as file:
            file.seek(45_000)
            file.write(b"damaged")
        assert found(cache, chunks(10)) == [number != 4 for number in range(10)]
        write(cache, chunks(10))
        assert all(found(cache, chunks(10)))

    @pytest.mark.parametrize("name", ["index", "*.segment"])
    @pytest.mark.parametrize("left", [0, 1, 100, 45_000])
    def test_truncated_files(self, tmp_path, name, left):
        write(DiskCache(10**7, tmp_path), chunks(10))
        (path,) = tmp_path.rglob(name)
        os.truncate(path, left)
        cache = DiskCache(10**7, tmp_path)
        assert found(cache, chunks(10)) == [
            10_000 * (number + 1) <= left and name != "index" for number in range(10)
        ]
        write(cache, chunks(20))
        assert all(found(cache, chunks(20)))
        assert n_bytes(tmp_path) <= 10**7

    @pytest.mark.parametrize("name", ["index", "*.segment", "*"])
    def test_files_that_are_removed_while_they_are_used(self, tmp_path, name):
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        for path in (tmp_path / "bytes").glob(name):
            path.unlink()
        found(cache, chunks(10))
        write(cache, chunks(20))
        write(cache, chunks(20))  # by the first of these it has noticed
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
        monkeypatch.setattr(_segments, "disk_usage", lambda folder: usage._replace(free=45_000))
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        assert not any(found(cache, chunks(10)))
        assert not [*tmp_path.rglob("*.segment")]

    def test_files_that_cannot_be_mapped(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_mapping, "_file_system", lambda folder: "nfs4")
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        assert all(found(cache, chunks(10)))
        assert all(found(DiskCache(PLENTY, tmp_path), chunks(10)))

    def test_a_process_that_holds_the_lock_is_not_waited_for(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_disk_cache, "_LOCK_SECONDS", 0.01)
        monkeypatch.setattr(_disk_cache, "_BUSY_SECONDS", 0.0)
        cache = DiskCache(PLENTY, tmp_path)
        write(cache, chunks(10))
        with (tmp_path / "bytes" / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write(cache, chunks(20))
            assert found(cache, chunks(20)) == [True] * 10 + [False] * 10
        write(cache, chunks(20))
        assert all(found(cache, chunks(20)))


def test_pickled(tmp_path):
    kept = DiskCache(PLENTY, tmp_path).object("a", "1", 100)
    assert kept is not None
    kept.write(np.array([5]), [b"abc"])
    assert pickle.loads(pickle.dumps(kept)).read(np.array([5]), np.array([3])) == [b"abc"]


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
