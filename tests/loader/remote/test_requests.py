"""Requests that are given up, and ranges at the edges of objects."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.servers.faults import Hang, Held, Status
from tests.servers.web import WebServer

from cellfeed import PathError, RemoteError
from cellfeed._bytes import StorageOptions, until_left
from cellfeed._bytes._remote import RemoteObjects, open_object
from cellfeed._bytes._remote._scheduler import scheduler_of
from cellfeed.sources import Location

CONTENT = np.random.default_rng(3).bytes(50_000)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one").write_bytes(CONTENT)
    return tmp_path


@pytest.fixture
def server(folder):
    with WebServer(folder) as server:
        yield server


def objects_of(server, name="one", *, versioned=True):
    location = Location(f"{server.url}/{name}")
    version = open_object(location) if versioned else None
    return RemoteObjects(lambda _: location, lambda _: version)


def ranges(*wanted):
    offsets, sizes = np.array(wanted, np.int64).reshape(-1, 2).T
    return np.zeros(len(offsets), np.int64), offsets.copy(), sizes.copy()


def read(objects, *wanted):
    return [bytes(each) for each in objects.read_ranges(*ranges(*wanted))]


def test_what_is_given_up_before_it_begins_leaves_room_for_others(server):
    objects = objects_of(server)
    server.answer = lambda _: Hang()
    for k in range(400):  # more than may ever be under way
        del_me = objects.expect(*ranges((k * 100, 10)))
        del del_me
    gc.collect()
    server.answer = None
    assert read(objects, (7, 10)) == [CONTENT[7:17]]


def test_who_tries_again_asks_again(server):
    """Also where the errors of before are kept, and with them what they came from."""
    objects, errors = objects_of(server), list[Exception]()
    for _ in range(5):
        server.answer = lambda _: Status(404)
        with pytest.raises(PathError) as raised:
            read(objects, (7, 10))
        errors.append(raised.value)
        server.answer = None
        assert read(objects, (7, 10)) == [CONTENT[7:17]]
    assert len(errors) == 5


def test_what_several_fetches_want_comes_with_the_first(server):
    objects = objects_of(server)
    first = objects.expect(*ranges((7, 10)))
    assert read(objects, (7, 10)) == [CONTENT[7:17]]
    server.answer = lambda _: Hang()
    later = [objects.expect(*ranges((7, 10))) for _ in range(20)]
    assert read(objects, (7, 10)) == [CONTENT[7:17]]
    assert all([first, *later])


def test_who_leaves_takes_nothing_from_others(server):
    objects, left, came = objects_of(server), threading.Event(), threading.Event()
    answered = threading.Event()
    server.answer = lambda _: Held(answered)
    expected = objects.expect(*ranges((7, 10)))
    assert expected is not None

    def leaving():
        until_left(left)
        came.set()
        with pytest.raises(RemoteError, match="was cancelled"):
            read(objects, (7, 10))

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.submit(leaving), threads.submit(read, objects, (7, 10))
        came.wait()
        left.set()
        one.result()
        answered.set()
        assert other.result() == [CONTENT[7:17]]


@pytest.mark.parametrize("versioned", [True, False])
def test_ranges_at_the_edges(server, versioned):
    wanted = [(0, 0), (5, 10), (5, 10), (8, 4), (49_990, 100), (50_000, 10), (90_000, 7), (3, 0)]
    if not versioned:
        wanted = wanted[:5]
    found = read(objects_of(server, versioned=versioned), *wanted)
    assert found == [CONTENT[first : first + n] for first, n in wanted]


def test_nothing(server):
    assert list(objects_of(server).read_ranges(*ranges())) == []


def test_far_into_a_large_object(folder, server):
    first = (1 << 32) + 12_345
    with (folder / "large").open("wb") as file:  # sparse
        file.seek(first)
        file.write(CONTENT)
    objects = objects_of(server, "large")
    assert read(objects, (first + 9, 1000), (5, 3)) == [CONTENT[9:1009], bytes(3)]
    assert server.requests[-1].range is not None


def test_ranges_arrive_as_they_are_answered(server, folder):
    apart = 40_000  # more than it is worth to read in vain
    content = np.random.default_rng(4).bytes(64 * apart)
    (folder / "far").write_bytes(content)
    objects = objects_of(server, "far")
    far = [(k * apart, 10) for k in range(64)]  # each a request: two batches of them
    server.answer = lambda request: Hang() if (request.range or (0, 0))[0] >= 32 * apart else None
    expected = objects.expect(*ranges(*far))
    early, late = objects.arrivals(*ranges(*far))
    assert early.ranges.tolist() == [*range(32)]
    assert late.ranges.tolist() == [*range(32, 64)]
    early.is_here.result(timeout=600)
    assert not late.is_here.done()
    assert read(objects, *far[:32]) == [content[first : first + 10] for first, _ in far[:32]]
    del expected


def test_objects_of_one_server_share_what_sends_requests(folder, server):
    (folder / "two").write_bytes(CONTENT)
    options = StorageOptions({}, 0)
    located = [Location.of(f"{server.url}/{name}").with_options(options) for name in ("one", "two")]
    assert scheduler_of(located[0]) is scheduler_of(located[1])
