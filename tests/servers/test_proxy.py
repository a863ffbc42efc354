"""The delaying proxy passes every byte on, in order, from many connections at once."""

import contextlib
import http.client
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pytest
from tests.servers.faults import Close, Reset
from tests.servers.proxy import DelayingProxy
from tests.servers.web import WebServer

CONTENT = np.random.default_rng(16).bytes(3_000_000)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "file.bin").write_bytes(CONTENT)
    with WebServer(tmp_path) as server:
        yield server


def connection_to(url):
    return contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=300))


def read(connection, start, stop):
    connection.request("GET", "/file.bin", headers={"Range": f"bytes={start}-{stop - 1}"})
    return connection.getresponse().read()


@pytest.mark.parametrize(("round_trip_s", "bytes_per_s"), [(0, None), (0.02, None), (0.01, 1e8)])
def test_bytes_of_many_connections(server, round_trip_s, bytes_per_s):
    def client(first):
        with connection_to(proxy.url) as connection:
            return all(
                read(connection, start, start + 50_000) == CONTENT[start : start + 50_000]
                for start in (first, first + 1_000_000)
            ) and (first % 50 or read(connection, 0, len(CONTENT)) == CONTENT)

    with (
        DelayingProxy(server.url, round_trip_s, bytes_per_s) as proxy,
        ThreadPoolExecutor(200) as clients,
    ):
        assert all(clients.map(client, range(200)))
    assert len(server.requests) == 404


def test_opening_and_each_answer_take_a_round_trip(server):
    # At least as long; how much longer is a matter of the machine.
    with DelayingProxy(server.url, 0.1) as proxy, connection_to(proxy.url) as connection:
        times = [time.perf_counter()]
        for _ in range(2):
            read(connection, 0, 10)
            times.append(time.perf_counter())
    opened, answered = np.diff(times)
    assert opened >= 0.2
    assert answered >= 0.1


def test_bandwidth_is_that_of_all_connections(server):
    def client(_):
        with connection_to(proxy.url) as connection:
            return read(connection, 0, 1_000_000)

    with DelayingProxy(server.url, 0, 2e7) as proxy, ThreadPoolExecutor(4) as clients:
        begin = time.perf_counter()
        assert set(clients.map(client, range(4))) == {CONTENT[:1_000_000]}
        assert time.perf_counter() - begin >= 4e6 / 2e7


def test_closed_and_reset_connections(server):
    with DelayingProxy(server.url, 0.01) as proxy:
        server.answer = lambda _: Close()
        with connection_to(proxy.url) as connection, pytest.raises(http.client.RemoteDisconnected):
            read(connection, 0, 10)
        server.answer = lambda _: Reset(10)
        with connection_to(proxy.url) as connection, pytest.raises(ConnectionResetError):
            read(connection, 0, 100)
        server.close()
        with connection_to(proxy.url) as connection, pytest.raises(ConnectionResetError):
            read(connection, 0, 100)


def test_one_direction_may_end_first():
    def echo():
        connection, _ = listener.accept()
        with connection:
            came = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            connection.sendall(came)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=echo)
        answering.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            DelayingProxy(url, 0.01) as proxy,
            socket.create_connection(("127.0.0.1", urlsplit(proxy.url).port)) as client,
        ):
            client.sendall(CONTENT)
            client.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: client.recv(1 << 16), b"")) == CONTENT
        answering.join()
