"""The web server of the tests answers as RFC 9110 says, and fails as it is told to."""

import http.client
import threading
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from obstore import get_range, head
from obstore.store import HTTPStore
from tests.servers.faults import (
    Close,
    ContentRange,
    Delay,
    Hang,
    Reset,
    Short,
    Status,
    WholeFile,
    redirect,
)
from tests.servers.web import WebServer

CONTENT = np.random.default_rng(16).bytes(700_000)
RANGE = {"Range": "bytes=100-299999"}


@pytest.fixture
def server(tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "file.bin").write_bytes(CONTENT)
    with WebServer(tmp_path) as server:
        yield server


@pytest.fixture
def ask(server):
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)

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
    connection.close()


def test_whole_and_ranges(server, ask):
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
    assert len({request.path for request in server.requests}) == 1


def test_head_missing_and_other_methods(server, ask):
    response, body = ask("HEAD")
    assert (response.status, response.headers["Content-Length"], body) == (200, "700000", b"")
    for path in ["/none", "/a%20b", "/../" + __file__, "/"]:
        assert ask(path=path)[0].status == 404
    assert ask("PUT")[0].status == 405
    assert [request.method for request in server.requests][:2] == ["HEAD", "GET"]


def test_conditions(server, ask):
    first, _ = ask("HEAD")
    etag, modified = first.headers["ETag"], first.headers["Last-Modified"]
    assert ask(If_None_Match=etag)[0].status == 304
    assert ask(If_None_Match='"other"')[0].status == 200
    assert ask(If_Match=etag, **RANGE)[0].status == 206
    assert ask(If_Match='"other"', **RANGE)[0].status == 412
    assert ask(If_Modified_Since=modified)[0].status == 304
    assert ask(If_Unmodified_Since="Mon, 01 Jan 2001 00:00:00 GMT")[0].status == 412
    assert ask(If_Range=etag, **RANGE)[0].status == 206
    server.replace("a b/file.bin", CONTENT[::-1])
    assert ask(If_Match=etag, **RANGE)[0].status == 412
    response, body = ask(If_Range=etag, **RANGE)
    assert (response.status, body) == (200, CONTENT[::-1])
    assert response.headers["ETag"] != etag


def test_obstore_reads(server):
    store = HTTPStore.from_url(server.url, client_options={"allow_http": True})
    found = head(store, "a b/file.bin")
    assert found["size"] == 700_000
    assert bytes(get_range(store, "a b/file.bin", start=5, end=400_000)) == CONTENT[5:400_000]
    assert server.requests[-1].headers["range"] == "bytes=5-399999"


def test_first_answer_fails_and_next_does_not(server, ask):
    server.answer = lambda request: (
        Delay(0.01, Status(503, {"Retry-After": "2"}, b"later")) if request.asked == 1 else None
    )
    response, body = ask(**RANGE)
    assert (response.status, response.headers["Retry-After"], body) == (503, "2", b"later")
    assert ask(**RANGE)[1] == CONTENT[100:300_000]
    assert [request.asked for request in server.requests] == [1, 2]


def test_answers_that_do_not_fit(server, ask):
    server.answer = lambda _: ContentRange("bytes 0-9/10")
    response, body = ask(**RANGE)
    assert response.headers["Content-Range"] == "bytes 0-9/10"
    assert body == CONTENT[100:300_000]
    server.answer = lambda _: ContentRange(None)
    assert "Content-Range" not in ask(**RANGE)[0].headers
    server.answer = lambda _: WholeFile()
    response, body = ask(**RANGE)
    assert (response.status, body) == (200, CONTENT)
    server.answer = lambda _: Short(10, announced=True)
    response, body = ask(**RANGE)
    assert response.headers["Content-Range"] == "bytes 100-109/700000"
    assert body == CONTENT[100:110]
    server.answer = lambda _: redirect("http://127.0.0.1:1/x")
    assert ask(**RANGE)[0].headers["Location"] == "http://127.0.0.1:1/x"


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


def test_closed_before_a_header(server, ask):
    server.answer = lambda _: Close()
    with pytest.raises(http.client.RemoteDisconnected):
        ask()


@pytest.mark.parametrize("after", [None, 10])
def test_what_hangs_ends_with_the_server(server, ask, after):
    server.answer = lambda _: Hang(after)
    raised = []

    def hang():
        try:
            ask()
        except (http.client.HTTPException, ConnectionError) as error:
            raised.append(error)

    client = threading.Thread(target=hang)
    client.start()
    while not server.requests:
        time.sleep(0.001)
    server.close()
    client.join()
    assert len(raised) == 1


def test_process(tmp_path):
    (tmp_path / "file.bin").write_bytes(CONTENT)
    with WebServer.in_process(tmp_path) as url:
        store = HTTPStore.from_url(url, client_options={"allow_http": True})
        assert bytes(get_range(store, "file.bin", start=5, end=700_000)) == CONTENT[5:]
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    with pytest.raises(ConnectionRefusedError):
        connection.connect()
