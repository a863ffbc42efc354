"""h5ad, zarr and files of 10x Genomics on a web server pass the suite of sources."""

import itertools
from dataclasses import replace

import pytest
from tests.loader.storages.test_conformance import TestH5ad as H5ad
from tests.loader.storages.test_conformance import write_h5ad
from tests.loader.storages.test_conformance_tenx import TestTenx as Tenx
from tests.loader.storages.test_conformance_zarr import TestZarr as Zarr
from tests.loader.storages.test_conformance_zarr import write_store
from tests.servers.web import WebServer

from cellfeed import open_collection
from cellfeed.sources import Location

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:zarr v3 autosharding:UserWarning"),
]


@pytest.fixture(scope="module")
def url_of(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp().parent
    with WebServer(folder) as server:
        yield lambda path: f"{server.url}/{path.absolute().relative_to(folder)}"


@pytest.fixture
def served(tmp_path, url_of):
    """Return a function that makes one that stores a case, and opens it on the server."""
    numbers = itertools.count()

    def writing(store, suffix):
        def write(case):
            path = tmp_path / f"{next(numbers):05}{suffix}"
            store(path, case)
            (source,) = open_collection(url_of(path), elements=[case.element]).sources
            return source

        return write

    return writing


class TestRemoteH5ad(H5ad):
    max_examples = 20
    test_in_worker_processes = None  # type: ignore[assignment]  # which are forked

    @pytest.fixture
    def write(self, served):
        return served(write_h5ad, ".h5ad")


class TestRemoteZarr(Zarr):
    max_examples = 20
    test_in_worker_processes = None  # type: ignore[assignment]

    @pytest.fixture
    def write(self, served):
        return served(write_store, ".zarr")

    def storages(self, layout, dtype):
        """Chunks that are not tiny, since each is a request; tiny ones are read from disk."""
        return (
            super()
            .storages(layout, dtype)
            .map(lambda each: replace(each, chunks=tuple(max(6, n) for n in each.chunks)))
        )


class TestRemoteTenx(Tenx):
    max_examples = 10
    test_in_worker_processes = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def remote(self, monkeypatch, url_of):
        monkeypatch.setattr(self, "where", lambda path: Location(url_of(path)))
