"""A server of plates, for tests that make it fail."""

import pytest
from tests.loader.bytes.remote.faulty import served
from tests.servers.web import WebServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served(tmp_path_factory.mktemp("served"))


@pytest.fixture
def server(folder):
    pytest.importorskip("obstore")
    with WebServer(folder) as server:
        yield server
