"""Remote bytes that are cached on disk. The oracle: a set of the ranges that were written."""

import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import commands

from cellfeed.bytes._remote import _disk_cache
from cellfeed.bytes._remote._disk_cache import DiskCache, ObjectVersion
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


@pytest.mark.parametrize("other", [("b", "1", 100), ("a", "2", 100), ("a", "1", 99)])
def test_another_identity_is_another_object(tmp_path, other):
    cache = DiskCache(PLENTY, tmp_path)
    one, another = ObjectVersion("a", "1", 100), ObjectVersion(*other)
    cache.write([(one, 5, b"abc"), (one, 1, memoryview(b"a view")[2:])])
    assert cache.read([(another, 5, 3), (one, 5, 3), (one, 1, 4)]) == [None, b"abc", b"view"]


def test_folder_is_that_of_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path))
    write(DiskCache(PLENTY), chunks(1))
    assert (cache_folder("bytes") / "ranges.sqlite").exists()


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

    @pytest.mark.slow
    def test_many_small_ranges(self, tmp_path):
        most = self.MOST // 4
        cache, ranges = DiskCache(most, tmp_path), chunks(500, size=10)
        write(cache, ranges)
        assert all(found(cache, ranges))
        write(cache, chunks(12_500, size=10))
        assert n_bytes(tmp_path) <= most


def flipped(seed):
    def flip(content):
        place = np.random.default_rng(seed).integers(len(content) if seed % 2 else 20_000)
        return content[:place] + bytes([content[place] ^ 1 << seed % 8]) + content[place + 1 :]

    return flip


def other_tables(_):
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE others (id)")
        return database.serialize()


class TestDamage:
    @pytest.mark.parametrize("seed", range(20))
    def test_a_flipped_byte_is_noticed(self, tmp_path, seed):
        there = self.found_in_damaged(tmp_path, flipped(seed), 300_000)
        cache = DiskCache(300_000, tmp_path)
        write(cache, chunks(10))
        assert sum(found(cache, chunks(10))) >= sum(there)
        write(cache, chunks(3, first=20))
        found(cache, chunks(30))
        assert n_bytes(tmp_path) <= 300_000

    def found_in_damaged(self, folder, damage, max_bytes):
        """Return what is found by one that is open and by another."""
        cache, path = DiskCache(max_bytes, folder), database_of(folder)
        write(cache, chunks(10))
        content = damage(path.read_bytes())
        for each in path.parent.iterdir():
            each.unlink()
        if content is not None:
            path.write_bytes(content)
        return found(cache, chunks(10))

    @pytest.mark.parametrize(
        "damage",
        [
            *(partial(lambda left, content: content[:left], n) for n in (0, 1, 4096, 45_000)),
            # SQLite's message has the damaged name, which Python cannot decode.
            lambda content: content.replace(b"TABLE ranges", b"\xd5" * 12),
            lambda content: content.replace(b"TABLE objects", b"\xd5" * 13),
            lambda content: content.replace(b"id INTEGER PRIMARY", b"\xd5" * 18),
            other_tables,
            lambda _: None,
        ],
    )
    def test_files_that_are_replaced(self, tmp_path, damage):
        self.found_in_damaged(tmp_path, damage, 10**7)
        cache = DiskCache(10**7, tmp_path)
        for _ in range(2):
            write(cache, chunks(20))
        assert all(found(DiskCache(10**7, tmp_path), chunks(20)))
        assert n_bytes(tmp_path) <= 10**7

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


def test_no_descriptor_stays_open(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, chunks(1))
    before = len([*Path("/dev/fd").iterdir()])
    for _ in range(5):
        write(cache, chunks(20))
        found(cache, chunks(30))
    assert len([*Path("/dev/fd").iterdir()]) == before


def test_a_full_disk(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, chunks(2))
    with commands.files_end_after(n_bytes(tmp_path)):
        write(cache, chunks(2, first=2))
        write(cache, chunks(1, first=4))
        assert found(cache, chunks(5)) == [True] * 2 + [False] * 3
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, chunks(2, first=2))
    assert found(cache, chunks(5)) == [True] * 4 + [False]


def test_threads(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)

    def use(first):
        for number in range(5):
            write(cache, chunks(20, first=first + 10 * number))
            found(cache, chunks(100))

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(use, (0, 20, 40, 60))] == [None] * 4
    assert all(found(cache, chunks(120)))


# Processes that share it, are killed, or may not write to it

N_RANGES = 300
forking = multiprocessing.get_context("fork")


def run(*targets):
    """Run functions in processes at once, and see that none raises."""
    children = [forking.Process(target=target, args=arguments) for target, *arguments in targets]
    for child in children:
        child.start()
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [0] * len(children)


def read_and_write(folder, max_bytes, seed):
    cache, moments = DiskCache(max_bytes, folder), random.Random(seed)
    for _ in range(20):
        some = moments.sample(chunks(N_RANGES), 20)
        there = found(cache, some)
        write(cache, [each for each, is_there in zip(some, there, strict=True) if not is_there])
        with suppress(FileNotFoundError):  # files go while they are listed
            assert n_bytes(folder) <= max_bytes


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [1_000_000, PLENTY])
def test_four_processes_at_once(tmp_path, max_bytes):
    run(*[(read_and_write, tmp_path, max_bytes, seed) for seed in range(4)])
    n_there = sum(found(DiskCache(max_bytes, tmp_path), chunks(N_RANGES)))
    assert n_there > 50 if max_bytes < PLENTY else n_there > N_RANGES * 0.9
    assert n_bytes(tmp_path) <= max_bytes


def write_for_ever(folder, max_bytes, seed):
    moments = random.Random(seed)
    while True:
        cache = DiskCache(max_bytes, folder)
        for _ in range(5):
            write(cache, moments.sample(chunks(N_RANGES), 5))
        if moments.random() < 0.3:
            for path in folder.rglob("*.sqlite"):
                path.unlink(missing_ok=True)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [1_000_000, PLENTY])
def test_killed_at_random_moments(tmp_path, max_bytes):
    moments, n_found, number = random.Random(0), 0, 0
    while number < 10 or n_found <= 50:  # how soon something is written is up to the machine
        children = [
            forking.Process(target=write_for_ever, args=(tmp_path, max_bytes, 2 * number + each))
            for each in range(2)
        ]
        for child in children:
            child.start()
        time.sleep(moments.uniform(0.01, 0.06) * (1 + number / 10))
        for child in children:
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
        n_found += sum(found(DiskCache(max_bytes, tmp_path), chunks(N_RANGES)))
        assert n_bytes(tmp_path) <= max_bytes
        number += 1
        assert number < 1000
    cache = DiskCache(max_bytes, tmp_path)
    write(cache, chunks(N_RANGES))
    write(cache, chunks(N_RANGES))  # what was dropped or damaged meanwhile
    assert all(found(cache, chunks(N_RANGES))) or max_bytes < PLENTY


def read_and_write_in_fork(cache):
    assert all(found(cache, chunks(2)))
    write(cache, chunks(2, first=2))
    assert all(found(cache, chunks(4)))


@pytest.mark.process
def test_a_fork_goes_on_with_the_cache(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, chunks(2))
    run((read_and_write_in_fork, cache))
    write(cache, chunks(1, first=4))
    assert all(found(cache, chunks(5)))


def use_without_permission(folder):
    if os.getuid() == 0:
        os.setuid(65534)
    assert not os.access(folder / "bytes", os.W_OK)
    cache = DiskCache(PLENTY, folder)
    for _ in range(2):
        assert found(cache, chunks(3)) == [True, True, False]
        write(cache, chunks(1, first=2))


@pytest.mark.process
def test_a_folder_that_can_only_be_read():
    with tempfile.TemporaryDirectory() as name:  # which others may enter, unlike `tmp_path`
        folder = Path(name)
        write(DiskCache(PLENTY, folder), chunks(2))
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            run((use_without_permission, folder))
        finally:
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o755)
