"""Requests that are given up, and ranges at the edges of objects."""

import gc

import numpy as np
import pytest
from tests.servers.faults import Hang
from tests.servers.web import WebServer

from cellfeed._bytes import Location
from cellfeed._remote import RemoteObjects, open_object

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
