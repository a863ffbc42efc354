"""Every byte store returns the bytes of its files, whatever was expected before."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers.web import WebServer

from cellfeed._bytes import StorageOptions
from cellfeed._bytes._remote import RemoteObjects, open_object
from cellfeed._storages._source import files_in
from cellfeed.sources import ByteStore, Location

rng = np.random.default_rng(0)
CONTENTS = [rng.bytes(n) for n in (0, 1, 4096, 4097, 300_000)]
NAMES = [str(k) for k in range(len(CONTENTS))]

ranges = st.lists(
    st.tuples(st.integers(0, len(CONTENTS) - 1), st.integers(0, 310_000), st.integers(0, 50_000)),
    max_size=12,
)


def columns(listed):
    return tuple(np.array(listed, np.int64).reshape(-1, 3).T.copy())


def expected(listed):
    return [CONTENTS[file][first : first + n] for file, first, n in listed]


def read(store, listed):
    found = store.read_ranges(*columns(listed))
    return [None if each is None else bytes(each) for each in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, content in zip(NAMES, CONTENTS, strict=True):
        (folder / name).write_bytes(content)
    return folder


class ByteStoreConformance:
    """Inherit from it, and give a fixture ``store`` of the module's files."""

    def test_any_ranges(self, store: Any):
        @given(ranges, ranges, st.booleans())
        def check(before, others, is_awaited):
            listed = others + before[::2]
            pending = store.expect(*columns(before))
            if not is_awaited:
                del pending
            arrivals = store.arrivals(*columns(listed))
            if arrivals is None:
                assert read(store, listed) == expected(listed)
                return
            together = [k for each in arrivals for k in each.ranges.tolist()]
            assert sorted(together) == list(range(len(listed)))
            for each in arrivals:
                each.is_here.result(60)
                own = [listed[k] for k in each.ranges.tolist()]
                assert read(store, own) == expected(own)

        check()

    def test_the_same_range_twice_and_nothing(self, store: Any):
        listed = [(4, 7, 10), (4, 7, 10), (4, 7, 0)]
        assert read(store, listed) == expected(listed)
        assert read(store, []) == []

    def test_sizes(self, store: Any):
        files = np.arange(len(CONTENTS))
        assert store.sizes(files).tolist() in ([len(each) for each in CONTENTS], [-1] * len(files))

    def test_by_many_threads_and_after_a_pickle(self, store: Any):
        copied = pickle.loads(pickle.dumps(store))
        listed = [(4, 1000 * k, 30_000) for k in range(100)]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda each: read(copied, [each])[0], listed))
        assert found == expected(listed)


class TestLocal(ByteStoreConformance):
    @pytest.fixture
    def store(self, folder):
        return files_in(folder, NAMES)


class InMemory(ByteStore):
    """As an extension may write it."""

    def location_of(self, file):
        return Location(f"memory://bucket/{file}")

    def sizes(self, files):
        return np.array([len(CONTENTS[file]) for file in files.tolist()], np.int64)

    def read_ranges(self, files, offsets, sizes):
        listed = zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        return [memoryview(CONTENTS[file])[first : first + n] for file, first, n in listed]


class TestInMemory(ByteStoreConformance):
    @pytest.fixture
    def store(self):
        return InMemory()


class Served:
    """Locations and versions of the files on a server, by number; can be pickled."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self.locations = [Location(f"{url}/{name}", options) for name in NAMES]
        self.versions = [open_object(each) for each in self.locations]

    def location(self, file: int) -> Location:
        return self.locations[file]

    def version(self, file: int) -> Any:
        return self.versions[file]

    def weak_version(self, file: int) -> Any:
        """Return a version by which nothing is cached on disk."""
        return replace(self.versions[file], etag=None)


@pytest.fixture(scope="module")
def url(folder):
    with WebServer.in_process(folder) as url:
        yield url


class TestRemote(ByteStoreConformance):
    cache_bytes = 0

    @pytest.fixture
    def served(self, url):
        return Served(url, StorageOptions({}, self.cache_bytes))

    @pytest.fixture(params=["version", "weak_version"])
    def store(self, served, request):
        return RemoteObjects(served.location, getattr(served, request.param))


class TestCached(TestRemote):
    cache_bytes = 10**7

    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path))
