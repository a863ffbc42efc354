"""What goes wrong for good ends with one line: where, what, and the remedy."""

import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.loader.remote.faulty import KINDS, VALUES, WAYS, quick, read, served
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

EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>hunter2</Message></Error>"
REPEATED = {
    "500": (Status(500), "500 Internal Server Error"),
    "503": (Status(503, {"Retry-After": "1"}), "503 Service Unavailable"),
    "429": (Status(429), "429 Too Many Requests"),
    "reset": (Reset(7), "the connection was reset"),
    "closed": (Close(), "closed before an answer"),
    "circle": (redirect("/p.h5ad"), "redirects in a circle"),
}
FINAL = {
    "401": (Status(401, {}, b"hunter2"), "401 Unauthorized.*renew"),
    "403": (Status(403, {}, b"hunter2"), "403 Forbidden.*renew"),
    "400": (Status(400, {}, EXPIRED), "400 Bad Request.*renew"),
}
OF_RANGES = {
    "short": (Short(7, announced=True), "got .*try again", 2),
    "no Content-Range": (ContentRange(None), "Content-Range.*try again", 2),
    "other Content-Range": (ContentRange("bytes 0-9/10"), "try again|replaced", 2),
    "whole file": (WholeFile(), "no byte ranges; download it", 0),
}


def assert_one_line(error, server, kind):
    said = str(error)
    assert "\n" not in said
    assert f"{server.url}/{kind}" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(("fault", "said"), REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_given_up_after_some_attempts(server, kind, way, fault, said):
    with pytest.raises(RemoteError, match=said) as raised:
        read(server, kind, way, lambda _: fault, quick())
    assert_one_line(raised.value, server, kind)
    if not said.startswith("redirects"):
        # An attempt on a connection that was reset before does not come to the server.
        assert 1 < max(request.asked for request in server.requests) <= 3


@pytest.mark.parametrize(("fault", "said"), FINAL.values(), ids=FINAL)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_refused_at_once(server, kind, way, fault, said):
    with pytest.raises(RemoteError, match=said) as raised:
        read(server, kind, way, lambda _: fault, quick())
    assert_one_line(raised.value, server, kind)
    assert max(request.asked for request in server.requests) == 1


def test_code_of_an_answer(server):
    with pytest.raises(RemoteError, match="ExpiredToken"):
        read(server, "p.h5ad", "rows", lambda _: Status(400, {}, EXPIRED), quick())


@pytest.mark.parametrize(("fault", "said", "n_repeated"), OF_RANGES.values(), ids=OF_RANGES)
@pytest.mark.parametrize("way", ["rows", "iteration"])
def test_ranges_that_are_not_those(server, way, fault, said, n_repeated):
    with pytest.raises(RemoteError, match=said) as raised:
        read(server, "p.h5ad", way, lambda _: fault, quick())
    assert_one_line(raised.value, server, "p.h5ad")
    assert "(bytes " in str(raised.value)
    assert max(request.asked for request in server.requests) == 1 + n_repeated


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_server_that_hangs(server, kind, way):
    with pytest.raises(RemoteError, match=r"no answer in time.*read_timeout"):
        read(server, kind, way, lambda _: Hang(), quick(1, seconds=0.5))


@pytest.mark.parametrize("way", WAYS)
def test_object_that_is_not_there(server, way):
    with pytest.raises(PathError, match="no such object; check the URL"):
        read(server, "p.h5ad", way, lambda _: Status(404), quick())


def test_zarr_that_is_not_there(server):
    with pytest.raises(FormatError, match="is not a zarr group; check the URL"):
        open_collection(f"{server.url}/none.zarr", storage_options=quick())


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://cellfeed.invalid"])
def test_server_that_is_not_there(url):
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        url = url.format(port=bound.getsockname()[1])
        with pytest.raises(RemoteError, match=r"refused|host name is unknown") as raised:
            open_collection(f"{url}/p.h5ad", storage_options=quick())
    assert "\n" not in str(raised.value)


def test_tls_to_a_plain_port(server):
    url = server.url.replace("http://", "https://")
    with pytest.raises(RemoteError, match=r"p\.h5ad: the server does not return it"):
        open_collection(f"{url}/p.h5ad", storage_options=quick(0, seconds=0.5))


def test_replaced_while_it_is_read(tmp_path):
    folder = served(tmp_path)
    with WebServer(folder) as server:
        there = open_collection(f"{server.url}/p.h5ad", storage_options=quick())
        np.testing.assert_array_equal(there[[5]].X.toarray(), VALUES[[5]])
        server.replace("p.h5ad", (folder / "p.h5ad").read_bytes())
        with pytest.raises(FormatError, match="replaced"):
            there[[500]]


@pytest.mark.parametrize("missing", ["ETag", "ETag and date"])
def test_replaced_by_another_size_without_etag(tmp_path, monkeypatch, missing):
    def without(answer, fault, state):
        gone = {"ETag"} if missing == "ETag" else {"ETag", "Last-Modified"}
        kept = {name: value for name, value in answer.headers.items() if name not in gone}
        return faulty(replace(answer, headers=kept), fault, state)

    monkeypatch.setattr(serving, "faulty", without)
    folder = served(tmp_path)
    with WebServer(folder) as server:
        there = open_collection(f"{server.url}/p.h5ad", storage_options=quick())
        np.testing.assert_array_equal(there[[5]].X.toarray(), VALUES[[5]])
        content = (folder / "p.h5ad").read_bytes()
        server.replace("p.h5ad", content + b" ")
        with pytest.raises(FormatError, match="replaced"):
            there[[500]]
        server.replace("p.h5ad", content[: len(content) // 2])
        with pytest.raises(FormatError, match="replaced"):
            there[[599]]


def test_truncated_object(tmp_path):
    folder = served(tmp_path)
    content = (folder / "p.h5ad").read_bytes()
    (folder / "p.h5ad").write_bytes(content[: len(content) // 2])
    with WebServer(folder) as server, pytest.raises(FormatError, match="truncated"):
        open_collection(f"{server.url}/p.h5ad", storage_options=quick())


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
