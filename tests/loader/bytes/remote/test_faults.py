"""What goes wrong once is asked for again; what stays wrong ends with one line and the remedy."""

import re
import socket
import struct
import threading
from collections import Counter
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from unittest.mock import Mock

import anndata
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader import matrices
from tests.loader.bytes.remote.faulty import KINDS, VALUES, WAYS, in_pairs, quick, read, served
from tests.servers import serving
from tests.servers.answers import faulty
from tests.servers.faults import (
    Close,
    ContentRange,
    Hang,
    Reset,
    Short,
    Status,
    WholeFile,
    redirect,
)
from tests.servers.web import WebServer

from cellfeed import FormatError, PathError, RemoteError, open_collection
from cellfeed.bytes._remote import Version

EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>hunter2</Message></Error>"
AFTER_1S = {"Retry-After": "1"}


def asked_for(request):
    """Return what is the same where obstore goes on after an answer that broke off."""
    return request.method, request.path, request.range and request.range[1]


def most_asked(server):
    return max(Counter(map(asked_for, server.requests)).values())


# Once


def first_fails(fault):
    seen = set()

    def answer(request):
        is_first = asked_for(request) not in seen
        seen.add(asked_for(request))
        return fault if is_first else None

    return answer


@pytest.mark.parametrize(
    ("kind", "way", "fault"),
    in_pairs([(Status(408),), (Status(429, AFTER_1S),), (Status(500),), (Status(503, AFTER_1S),),
              (Reset(),), (Reset(7),), (Close(),), (Short(7),)]),
    ids=str,
)  # fmt: skip
def test_asked_again(server, kind, way, fault):
    read(server, kind, way, first_fails(fault), quick(20))
    assert most_asked(server) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("after", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_asked_again_where_nothing_comes(server, kind, after):
    read(server, kind, "rows", first_fails(Hang(after)), quick(20, seconds=1.0))
    assert most_asked(server) >= 2


@pytest.mark.parametrize("n_retries", [0, 1, 3])
def test_as_often_as_the_user_says(server, n_retries):
    with pytest.raises(OSError, match="500 Internal Server Error"):
        read(server, "p.h5ad", "opening", lambda _: Status(500), quick(n_retries))
    assert len(server.requests) == 1 + n_retries


# For good


def assert_one_line(error, server, kind):
    said = str(error)
    assert "\n" not in said
    assert f"{server.url}/{kind}" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("kind", "way", "fault", "said", "attempts"),
    in_pairs(
        [
            # An attempt on a connection that was reset before does not come to the server.
            (Status(500), "500 Internal Server Error", (2, 3)),
            (Status(503, AFTER_1S), "503 Service Unavailable", (2, 3)),
            (Status(429), "429 Too Many Requests", (2, 3)),
            (Reset(7), "the connection was reset", (2, 3)),
            (Close(), "closed before an answer", (2, 3)),
            (redirect("/p.h5ad"), "redirects in a circle", (1, 1000)),
            (Status(401, {}, b"hunter2"), "401 Unauthorized.*renew", (1, 1)),
            (Status(403, {}, b"hunter2"), "403 Forbidden.*renew", (1, 1)),
            (Status(400, {}, EXPIRED), "400 Bad Request.*renew", (1, 1)),
        ]
    ),
    ids=str,
)
def test_given_up(server, kind, way, fault, said, attempts):
    """At once, or after some attempts."""
    with pytest.raises(RemoteError, match=said) as raised:
        read(server, kind, way, lambda _: fault, quick())
    assert_one_line(raised.value, server, kind)
    assert attempts[0] <= most_asked(server) <= attempts[1]
    if (kind, way) == ("p.h5ad", "rows") and isinstance(fault, Status) and fault.body == EXPIRED:
        assert "ExpiredToken" in str(raised.value)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Short(7, announced=True), "got .*try again"),
        (ContentRange(None), "Content-Range.*try again"),
        (ContentRange("bytes and more"), "CONTENT_RANGE.*try again"),
        (ContentRange("bytes 0-9/10"), "try again|replaced"),
        (WholeFile(), "no byte ranges; download it"),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["rows", "iteration"])
def test_ranges_that_are_not_those(server, way, fault, said):
    with pytest.raises(RemoteError, match=said) as raised:
        read(server, "p.h5ad", way, lambda _: fault, quick())
    assert_one_line(raised.value, server, "p.h5ad")
    assert "(bytes " in str(raised.value)
    assert most_asked(server) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_server_that_hangs(server, kind, way):
    with pytest.raises(RemoteError, match=r"no answer in time.*read_timeout"):
        read(server, kind, way, lambda _: Hang(), quick(1, seconds=0.5))


@pytest.mark.parametrize("way", WAYS)
def test_object_that_is_not_there(server, way):
    with pytest.raises(PathError, match="no such object; check the URL"):
        read(server, "p.h5ad", way, lambda _: Status(404), quick())
    with pytest.raises(FormatError, match="is not a zarr group; check the URL"):
        open_collection(f"{server.url}/none.zarr", storage_options=quick())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:{port}", "refused"),
        ("http://cellfeed.invalid", "host name is unknown"),
        ("https://127.0.0.1:{served}", r"p\.h5ad: the server does not return it"),
    ],
)
def test_server_that_is_not_there(server, url, said):
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        url = url.format(port=bound.getsockname()[1], served=server.url.rpartition(":")[2])
        with pytest.raises(RemoteError, match=said) as raised:
            open_collection(f"{url}/p.h5ad", storage_options=quick(0, seconds=0.5))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("n_more", [-3, 3])
@pytest.mark.parametrize("way", ["opening", "rows"])
def test_answers_that_are_too_short_or_too_long(folder, server, monkeypatch, way, n_more):
    content = (folder / "p.h5ad").read_bytes() + b"end"

    def changed(answer, fault, _):
        if not fault or answer.status != HTTPStatus.PARTIAL_CONTENT:
            return answer
        return replace(answer, body=content[answer.start : answer.stop + n_more], start=0, stop=0)

    monkeypatch.setattr(serving, "faulty", changed)
    with pytest.raises(RemoteError, match=r"the server returned .* bytes, not ") as raised:
        read(server, "p.h5ad", way, lambda _: WholeFile(), quick())
    assert_one_line(raised.value, server, "p.h5ad")
    returned, requested = re.findall(r"([\d,]+) bytes, not ([\d,]+);", str(raised.value))[0]
    assert int(returned.replace(",", "")) == int(requested.replace(",", "")) + n_more
    assert most_asked(server) == 1


def test_errors_of_our_own_code_are_what_they_are(server, monkeypatch):
    """They are not the server's, and do not pass."""
    there = open_collection(f"{server.url}/p.h5ad", storage_options=quick())
    for error in (TypeError("ours"), ZeroDivisionError("ours")):
        server.requests.clear()
        monkeypatch.setattr(Version, "check", Mock(side_effect=error))
        with pytest.raises(type(error), match=r"^ours$"):
            there[[599]]
        assert len({request.range for request in server.requests}) == len(server.requests)


@pytest.mark.parametrize("kind", ["itself", "a level above"])
def test_index_of_chunks_that_refers_to_itself(tmp_path, kind):
    """HDF5 would follow it until its stack is full."""
    path = tmp_path / "a.h5ad"
    values = sp.random(200, 30, density=0.5, format="csr", dtype=np.float32, random_state=0)
    anndata.AnnData(values).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        matrices.replace(file, "X/data", file["X/data"][:], chunks=(9,))
    content = bytearray(path.read_bytes())
    root = next(k for k in range(len(content)) if content[k : k + 6] == b"TREE\x01\x01")
    first_child = root + 24 + 2 * 8 + 8
    if kind == "itself":
        struct.pack_into("<Q", content, first_child, root)
    else:
        content[struct.unpack_from("<Q", content, first_child)[0] + 5] = 2
    path.write_bytes(content)
    with WebServer(tmp_path) as server, pytest.raises(FormatError, match="index of the chunks"):
        open_collection(f"{server.url}/a.h5ad", storage_options=quick()).load_tables()


# Replaced, or cut


@pytest.mark.parametrize("missing", [[], ["ETag"], ["ETag", "Last-Modified"]], ids=str)
def test_replaced_while_it_is_read(tmp_path, monkeypatch, missing):
    """Without an ETag, and without the date, by its size."""

    def without(answer, fault, state):
        kept = {name: value for name, value in answer.headers.items() if name not in missing}
        return faulty(replace(answer, headers=kept), fault, state)

    monkeypatch.setattr(serving, "faulty", without)
    folder = served(tmp_path)
    with WebServer(folder) as server:
        there = open_collection(f"{server.url}/p.h5ad", storage_options=quick())
        np.testing.assert_array_equal(there[[5]].X.toarray(), VALUES[[5]])
        content = (folder / "p.h5ad").read_bytes()
        server.replace("p.h5ad", content + b" " if missing else content)
        with pytest.raises(FormatError, match="replaced"):
            there[[500]]
        server.replace("p.h5ad", content[: len(content) // 2])
        with pytest.raises(FormatError, match="replaced"):
            there[[599]]
        with pytest.raises(FormatError, match="truncated"):
            open_collection(f"{server.url}/p.h5ad", storage_options=quick())


@pytest.mark.parametrize(("missing", "is_replaced"), [([], True), (["ETag"], False)], ids=str)
def test_what_broke_off_is_continued_from_the_same_version_only(
    tmp_path, monkeypatch, missing, is_replaced
):
    """Without an ETag, nothing says that it is the same."""

    def without(answer, fault, state):
        kept = {name: value for name, value in answer.headers.items() if name not in missing}
        return faulty(replace(answer, headers=kept), fault, state)

    monkeypatch.setattr(serving, "faulty", without)
    folder, broken = served(tmp_path), list[object]()
    other = bytes(255 - byte for byte in (folder / "p.h5ad").read_bytes())
    with WebServer(folder) as server:
        there = open_collection(f"{server.url}/p.h5ad", storage_options=quick())
        there.load_tables()

        def answer(request):
            if broken:
                return None
            broken.append(request)
            if is_replaced:
                server.replace("p.h5ad", other)
            return Reset(7)

        server.answer = answer
        with pytest.raises((RemoteError, FormatError), match=r"reset|replaced"):
            there[[599]]
        assert broken


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_request_works_and_nothing_is_left_open(server, kind):
    def read_and_fail():
        there = open_collection(f"{server.url}/{kind}", storage_options=quick(0))
        for fault in (Reset(7), Status(500), Short(3), Close()):
            server.answer = lambda _, fault=fault: fault
            with pytest.raises(RemoteError):
                there[[599]]
            server.answer = None
            np.testing.assert_array_equal(there[[599]].X.toarray(), VALUES[[599]])

    read_and_fail()  # what stays for the process: the loop of requests, zarr's
    threads = {each.name for each in threading.enumerate()}
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        read_and_fail()
    assert {each.name for each in threading.enumerate()} <= threads
    # Connections are kept for the next request to the same server.
    assert len(list(Path("/proc/self/fd").iterdir())) <= n_open + 60
