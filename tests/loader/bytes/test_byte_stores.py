"""Every byte store returns the bytes of its files, whatever was expected before."""

import gc
import heapq
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers.faults import Hang, Held, Status
from tests.servers.web import WebServer

from cellfeed import PathError, RemoteError
from cellfeed.bytes import StorageOptions, set_cancel_events
from cellfeed.bytes._remote import RemoteObjects, open_object
from cellfeed.bytes._remote._objects import Window, scheduler_of
from cellfeed.sources import ByteStore, Location
from cellfeed.sources._source import files_in

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
        """Return a version without an ETag."""
        return replace(self.versions[file], etag=None)


@pytest.fixture(scope="module")
def url(folder):
    with WebServer(folder) as server:
        yield server.url


class TestRemote(ByteStoreConformance):
    @pytest.fixture
    def served(self, url):
        return Served(url, StorageOptions())

    @pytest.fixture(params=["version", "weak_version"])
    def store(self, served, request):
        return RemoteObjects(served.location, getattr(served, request.param))


# Requests that are given up, and ranges at the edges of objects

CONTENT = CONTENTS[4]


@pytest.fixture
def server(folder):
    with WebServer(folder) as server:
        yield server


def objects_of(server, name="4", *, versioned=True):
    location = Location(f"{server.url}/{name}")
    version = open_object(location) if versioned else None
    return RemoteObjects(lambda _: location, lambda _: version)


def of_one(*wanted):
    offsets, sizes = np.array(wanted, np.int64).reshape(-1, 2).T
    return np.zeros(len(offsets), np.int64), offsets.copy(), sizes.copy()


def read_all(objects, *wanted):
    return [bytes(each) for each in objects.read_ranges(*of_one(*wanted))]


def test_what_is_given_up_before_it_begins_leaves_room_for_others(server):
    objects = objects_of(server)
    server.answer = lambda _: Hang()
    for k in range(400):  # more than may ever be under way
        del_me = objects.expect(*of_one((k * 100, 10)))
        del del_me
    gc.collect()
    server.answer = None
    assert read_all(objects, (7, 10)) == [CONTENT[7:17]]


def test_who_tries_again_asks_again(server):
    """Also where the errors of before are kept, and with them what they came from."""
    objects, errors = objects_of(server), list[Exception]()
    for _ in range(5):
        server.answer = lambda _: Status(404)
        with pytest.raises(PathError) as raised:
            read_all(objects, (7, 10))
        errors.append(raised.value)
        server.answer = None
        assert read_all(objects, (7, 10)) == [CONTENT[7:17]]
    assert len(errors) == 5


def test_what_several_fetches_want_comes_with_the_first(server):
    objects = objects_of(server)
    first = objects.expect(*of_one((7, 10)))
    assert read_all(objects, (7, 10)) == [CONTENT[7:17]]
    server.answer = lambda _: Hang()
    later = [objects.expect(*of_one((7, 10))) for _ in range(20)]
    assert read_all(objects, (7, 10)) == [CONTENT[7:17]]
    assert all([first, *later])


def test_who_leaves_takes_nothing_from_others(server):
    objects, left, came = objects_of(server), threading.Event(), threading.Event()
    answered = threading.Event()
    server.answer = lambda _: Held(answered)
    expected = objects.expect(*of_one((7, 10)))
    assert expected is not None

    def leaving():
        set_cancel_events(left)
        came.set()
        with pytest.raises(RemoteError, match="was cancelled"):
            read_all(objects, (7, 10))

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.submit(leaving), threads.submit(read_all, objects, (7, 10))
        came.wait()
        left.set()
        one.result()
        answered.set()
        assert other.result() == [CONTENT[7:17]]


@pytest.mark.parametrize("versioned", [True, False])
def test_ranges_at_the_edges(server, versioned):
    n = len(CONTENT)
    wanted = [(0, 0), (5, 10), (5, 10), (8, 4), (n - 10, 100), (n, 10), (n + 9000, 7), (3, 0)]
    if not versioned:
        wanted = wanted[:5]
    found = read_all(objects_of(server, versioned=versioned), *wanted)
    assert found == [CONTENT[first : first + size] for first, size in wanted]


def test_far_into_a_large_object(folder, server):
    first = (1 << 32) + 12_345
    with (folder / "large").open("wb") as file:  # sparse
        file.seek(first)
        file.write(CONTENT)
    objects = objects_of(server, "large")
    assert read_all(objects, (first + 9, 1000), (5, 3)) == [CONTENT[9:1009], bytes(3)]
    assert server.requests[-1].range is not None


def test_ranges_arrive_as_they_are_answered(server, folder):
    apart = 100_000  # more than it is worth to read in vain
    content = np.random.default_rng(4).bytes(64 * apart)
    (folder / "far").write_bytes(content)
    objects = objects_of(server, "far")
    far = [(k * apart, 10) for k in range(64)]  # each a request: two batches of them
    server.answer = lambda request: Hang() if (request.range or (0, 0))[0] >= 32 * apart else None
    expected = objects.expect(*of_one(*far))
    early, late = objects.arrivals(*of_one(*far))
    assert early.ranges.tolist() == [*range(32)]
    assert late.ranges.tolist() == [*range(32, 64)]
    early.is_here.result(timeout=600)
    assert not late.is_here.done()
    assert read_all(objects, *far[:32]) == [content[first : first + 10] for first, _ in far[:32]]
    del expected


def test_objects_of_one_server_share_what_sends_requests(server):
    options = StorageOptions()
    located = [Location.of(f"{server.url}/{name}").with_options(options) for name in ("4", "two")]
    assert scheduler_of(located[0]) is scheduler_of(located[1])


# How many requests are sent at a time, on simulated links

N_REQUESTS = 12_000


def sent_over(window, *, latency, bandwidth, n_bytes):
    """Send requests over a link that answers one after the other; return how long they take."""
    under_way = list[tuple[float, float]]()
    now, free_at = 1.0, 0.0
    n_sent = n_connections = 0
    while n_sent < N_REQUESTS or under_way:
        while n_sent < N_REQUESTS and len(under_way) < window.limit:
            is_new = len(under_way) >= n_connections
            n_connections += is_new
            free_at = max(now + latency * (1 + is_new), free_at) + n_bytes / bandwidth
            heapq.heappush(under_way, (free_at, now))
            n_sent += 1
        now, began = heapq.heappop(under_way)
        window.record(began, now, is_full=n_sent < N_REQUESTS)
    return now - 1.0


@pytest.mark.parametrize("latency", [0.001, 0.01, 0.05, 0.15])
@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 1e8])
def test_throughput_is_that_of_the_link(latency, bandwidth):
    window, n_bytes = Window(), 40_000
    seconds = sent_over(window, latency=latency, bandwidth=bandwidth, n_bytes=n_bytes)
    best = min(bandwidth, 256 * n_bytes / latency)
    assert N_REQUESTS * n_bytes / seconds > 0.6 * best
    needed = max(4.0, bandwidth * latency / n_bytes)  # what is under way on a link that is full
    assert window.limit < 8 * needed


def test_times_of_a_window_that_is_not_full_say_nothing():
    window = Window()
    for k in range(1_000):
        window.record(float(k), k + 0.1, is_full=False)
    assert window.limit == 8
