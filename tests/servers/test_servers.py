"""The servers of the tests answer as they should, fail as they are told to, and end with them."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from obstore import get_range
from obstore.exceptions import BaseError
from obstore.store import S3Store
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
from tests.servers.proxy import DelayingProxy
from tests.servers.web import WebServer

CONTENT = np.random.default_rng(16).bytes(700_000)
RANGE = {"Range": "bytes=100-299999"}


@pytest.fixture
def server(tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "file.bin").write_bytes(CONTENT)
    with WebServer(tmp_path) as server:
        yield server


def connected(url):
    return contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=300))


@pytest.fixture
def ask(server):
    with connected(server.url) as connection:

        def ask(method="GET", path="/a%20b/file.bin", **headers):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            try:
                connection.request(method, path, headers=named)
                response = connection.getresponse()
                return response, response.read()
            except (http.client.HTTPException, ConnectionError):
                connection.close()
                raise

        yield ask


def test_whole_files_and_ranges(server, ask):
    response, body = ask()
    assert (response.status, body) == (200, CONTENT)
    for asked, start, stop in [
        ("0-0", 0, 1),
        ("100-299999", 100, 300_000),
        ("699999-", 699_999, 700_000),
        ("-10", 699_990, 700_000),
        ("600000-900000", 600_000, 700_000),
    ]:
        response, body = ask(Range=f"bytes={asked}")
        assert (response.status, body) == (206, CONTENT[start:stop])
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/700000"
        assert server.requests[-1].range == (start, stop)
        assert server.requests[-1].sent == stop - start
    assert ask(Range="bytes=700000-")[0].status == 416
    assert ask(Range="bytes=0-1,5-6")[0].status == 200
    etag = response.headers["ETag"]
    server.replace("a b/file.bin", CONTENT)
    response, body = ask("HEAD")
    assert response.headers["ETag"] not in (None, etag)
    assert (response.status, response.headers["Content-Length"], body) == (200, "700000", b"")
    for path in ["/none", "/a%20b", "/../" + __file__, "/"]:
        assert ask(path=path)[0].status == 404
    assert ask("PUT")[0].status == 405


@pytest.mark.parametrize(
    ("fault", "status", "content_range", "n_bytes"),
    [
        (Status(503), 503, None, 0),
        (ContentRange("bytes 0-9/10"), 206, "bytes 0-9/10", 299_900),
        (ContentRange(None), 206, None, 299_900),
        (WholeFile(), 200, None, 700_000),
        (Short(10, announced=True), 206, "bytes 100-109/700000", 10),
        (redirect("http://127.0.0.1:1/x"), 302, None, 0),
    ],
    ids=str,
)
def test_answers_that_do_not_fit(server, ask, fault, status, content_range, n_bytes):
    server.answer = lambda request: fault if request.asked == 1 else None
    response, body = ask(**RANGE)
    assert (response.status, response.headers["Content-Range"]) == (status, content_range)
    assert body == (CONTENT if n_bytes == 700_000 else CONTENT[100 : 100 + n_bytes])
    assert ask(**RANGE)[1] == CONTENT[100:300_000]
    assert [request.asked for request in server.requests] == [1, 2]


@pytest.mark.parametrize("after", [0, 10, 299_000])
def test_bodies_that_end_early(server, ask, after):
    server.answer = lambda _: Short(after)
    with pytest.raises(http.client.IncompleteRead) as short:
        ask(**RANGE)
    assert short.value.partial == CONTENT[100 : 100 + after]
    server.answer = lambda _: Reset(after)
    with pytest.raises(ConnectionResetError):
        ask(**RANGE)
    assert [request.sent for request in server.requests] == [after, after]
    server.answer = lambda _: Close()
    with pytest.raises(http.client.RemoteDisconnected):
        ask()


@pytest.mark.parametrize("after", [None, 10])
def test_what_hangs_ends_with_the_server(server, ask, after):
    server.answer = lambda _: Hang(after)
    with ThreadPoolExecutor(1) as clients:
        hanging = clients.submit(ask)
        while not server.requests:
            time.sleep(0.001)
        server.close()
        assert isinstance(hanging.exception(), http.client.HTTPException | ConnectionError)


# The proxy


def read(connection, start, stop):
    connection.request("GET", "/a%20b/file.bin", headers={"Range": f"bytes={start}-{stop - 1}"})
    return connection.getresponse().read()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("round_trip_s", "bytes_per_s"), [(0, None), (0.02, None), (0.01, 2e7)])
def test_bytes_of_many_connections(server, round_trip_s, bytes_per_s):
    def client(first):
        with connected(proxy.url) as connection:
            return all(
                read(connection, start, start + 50_000) == CONTENT[start : start + 50_000]
                for start in (first, first + 100_000)
            )

    with (
        DelayingProxy(server.url, round_trip_s, bytes_per_s) as proxy,
        ThreadPoolExecutor(60) as clients,
    ):
        begin = time.perf_counter()
        assert all(clients.map(client, range(60)))
        seconds = time.perf_counter() - begin
    # At least as long; how much longer is a matter of the machine.
    assert seconds >= 3 * round_trip_s
    assert seconds >= 60 * 2 * 50_000 / (bytes_per_s or np.inf)
    assert len(server.requests) == 120


@pytest.mark.process
def test_connections_that_end(server):
    """They are closed or reset at both ends; one direction may end first."""
    with DelayingProxy(server.url, 0.01) as proxy:
        server.answer = lambda _: Close()
        with connected(proxy.url) as connection, pytest.raises(http.client.RemoteDisconnected):
            read(connection, 0, 10)
        server.answer = lambda _: Reset(10)
        with connected(proxy.url) as connection, pytest.raises(ConnectionResetError):
            read(connection, 0, 100)
        server.close()
        with connected(proxy.url) as connection, pytest.raises(ConnectionResetError):
            read(connection, 0, 100)

    def echo():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"".join(iter(lambda: connection.recv(1 << 16), b"")))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=echo)
        answering.start()
        with (
            DelayingProxy(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.01) as proxy,
            socket.create_connection(("127.0.0.1", urlsplit(proxy.url).port)) as client,
        ):
            client.sendall(CONTENT)
            client.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: client.recv(1 << 16), b"")) == CONTENT
        answering.join()


# The object store


@pytest.mark.server
def test_only_who_has_the_credentials_reads(s3_server, server, tmp_path):
    key = "test_s3/a b/file.bin"
    assert s3_server.put(tmp_path / "a b/file.bin", key) == f"s3://{s3_server.bucket}/{key}"
    with DelayingProxy(s3_server.url, 0.01) as proxy:
        for url in (s3_server.url, proxy.url):
            store = S3Store(s3_server.bucket, **s3_server.options | {"endpoint": url})
            assert bytes(get_range(store, key, start=5, end=500_000)) == CONTENT[5:500_000]
    for wrong in (
        {"secret_access_key": "other"},
        {"access_key_id": "nobody"},
        {"skip_signature": True},
    ):
        store = S3Store(s3_server.bucket, **s3_server.options | wrong)
        with pytest.raises(BaseError, match=r"403|Forbidden|denied"):
            get_range(store, key, start=0, end=5)


KILLED = """
import os, sys
from pathlib import Path
from tests.servers.s3 import S3Server
from tests.servers.web import WebServer
s3 = S3Server(Path(sys.argv[1])).__enter__()
web = WebServer.in_process(Path(sys.argv[1])).__enter__()
print(s3.url, web, flush=True)
os._exit(0)
"""


@pytest.mark.server
@pytest.mark.slow
def test_servers_end_with_tests_that_are_killed(s3_server, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for url in done.stdout.split():
        place, end = ("127.0.0.1", urlsplit(url).port), time.monotonic() + 300
        is_there = True
        while is_there:
            assert time.monotonic() < end
            with socket.socket() as client:
                is_there = client.connect_ex(place) == 0
            time.sleep(0.01)
