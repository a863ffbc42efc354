"""A disk cache that processes share, are killed at, or may not write to."""

import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from cellfeed._bytes._remote._disk_cache import DiskCache, ObjectVersion

MOST, SIZE, N_RANGES = 4_000_000, 10_000, 300
PLENTY = 10**8

forking = multiprocessing.get_context("fork")


def content(number):
    return np.random.default_rng(number).bytes(SIZE)


CONTENTS = [content(number) for number in range(N_RANGES)]


VERSION = ObjectVersion("https://host/a", "1", 10**9)


def write(cache, numbers):
    cache.write([(VERSION, each * SIZE, CONTENTS[each]) for each in numbers])


def found(cache, numbers=range(N_RANGES)):
    """Return the numbers of ranges that are there, all of them right."""
    read = cache.read([(VERSION, each * SIZE, SIZE) for each in numbers])
    there = [each for each, cached in zip(numbers, read, strict=True) if cached is not None]
    assert all(each in (None, CONTENTS[k]) for k, each in zip(numbers, read, strict=True))
    return there


def n_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


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
    for _ in range(30):
        numbers = moments.sample(range(N_RANGES), 20)
        there = found(cache, numbers)
        write(cache, [each for each in numbers if each not in there])
        assert folder_is_bounded(folder, max_bytes)


def folder_is_bounded(folder, max_bytes):
    """Return whether it is, though files go while they are listed."""
    try:
        return n_bytes(folder) <= max_bytes
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("max_bytes", [MOST // 4, PLENTY])
def test_four_processes_at_once(tmp_path, max_bytes):
    run(*[(read_and_write, tmp_path, max_bytes, seed) for seed in range(4)])
    there = found(DiskCache(max_bytes, tmp_path))
    assert len(there) > 50 if max_bytes < PLENTY else len(there) > N_RANGES * 0.95
    assert n_bytes(tmp_path) <= max_bytes


def write_for_ever(folder, max_bytes, seed):
    moments = random.Random(seed)
    while True:
        cache = DiskCache(max_bytes, folder)
        for _ in range(5):
            write(cache, moments.sample(range(N_RANGES), 5))
        if moments.random() < 0.3:
            for path in folder.rglob("*.sqlite"):
                path.unlink(missing_ok=True)


@pytest.mark.parametrize("max_bytes", [MOST // 4, PLENTY])
def test_killed_at_random_moments(tmp_path, max_bytes):
    moments, n_found, number = random.Random(0), 0, 0
    while number < 25 or n_found <= 100:  # how soon something is written is up to the machine
        children = [
            forking.Process(target=write_for_ever, args=(tmp_path, max_bytes, 2 * number + each))
            for each in range(2)
        ]
        for child in children:
            child.start()
        time.sleep(moments.uniform(0.01, 0.06) * (1 + number / 25))
        for child in children:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            assert child.exitcode == -signal.SIGKILL
        cache = DiskCache(max_bytes, tmp_path)
        n_found += len(found(cache))
        assert n_bytes(tmp_path) <= max_bytes
        number += 1
        assert number < 1000
    write(cache, range(N_RANGES))
    write(cache, range(N_RANGES))  # what was dropped or damaged meanwhile
    assert len(found(cache)) == N_RANGES or max_bytes < PLENTY


def test_one_writes_what_the_other_reads(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, [0])
    run((write, DiskCache(PLENTY, tmp_path), [1, 2]))
    assert found(cache) == [0, 1, 2]


def read_and_write_in_fork(cache):
    assert found(cache) == [0, 1]
    write(cache, [2, 3])
    assert found(cache) == [0, 1, 2, 3]


def test_a_fork_goes_on_with_the_cache(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, [0, 1])
    run((read_and_write_in_fork, cache))
    write(cache, [4])
    assert found(cache) == [0, 1, 2, 3, 4]


def test_no_descriptor_stays_open(tmp_path):
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, [0])
    before = len([*Path("/dev/fd").iterdir()])
    for _ in range(5):
        write(cache, range(20))
        found(cache)
    assert len([*Path("/dev/fd").iterdir()]) == before


def use_without_permission(folder):
    if os.getuid() == 0:
        os.setuid(65534)
    assert not os.access(folder / "bytes", os.W_OK)
    cache = DiskCache(PLENTY, folder)
    for _ in range(2):
        assert found(cache) == [0, 1]
        write(cache, [2])


def test_a_folder_that_can_only_be_read():
    with tempfile.TemporaryDirectory() as name:  # which others may enter, unlike `tmp_path`
        folder = Path(name)
        write(DiskCache(PLENTY, folder), [0, 1])
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            run((use_without_permission, folder))
        finally:
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o755)


def use_with_a_full_disk(folder):
    cache = DiskCache(PLENTY, folder)
    write(cache, [0, 1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes(folder), n_bytes(folder)))
    write(cache, [2, 3])
    write(cache, [4])
    assert found(cache) == [0, 1]


def test_a_full_disk(tmp_path):
    run((use_with_a_full_disk, tmp_path))
    cache = DiskCache(PLENTY, tmp_path)
    write(cache, [2, 3])
    assert found(cache) == [0, 1, 2, 3]
