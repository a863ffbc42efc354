"""h5ad, zarr and files of 10x Genomics on a web server pass the suite of sources."""

from dataclasses import replace

import pytest
from tests.loader.storages.test_conformance import TestH5ad as H5ad
from tests.loader.storages.test_conformance_tenx import TestTenx as Tenx
from tests.loader.storages.test_conformance_zarr import TestZarr as Zarr
from tests.servers.web import WebServer

from cellfeed._storages._anndata import _open
from cellfeed._storages._anndata._remote_h5file import RemoteH5File
from cellfeed._storages._anndata._zarr import RemoteZarrStore, anndata_groups
from cellfeed.sources import Location

pytestmark = pytest.mark.filterwarnings("ignore:zarr v3 autosharding:UserWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with WebServer.in_process(tmp_path_factory.getbasetemp().parent) as url:
        yield tmp_path_factory.getbasetemp().parent, url


def url_of(root, location):
    folder, url = root
    return Location(f"{url}/{location.path.absolute().relative_to(folder)}")


class TestRemoteH5ad(H5ad):
    max_examples = 20
    test_in_worker_processes = None  # type: ignore[assignment]  # which are forked

    @pytest.fixture(autouse=True)
    def remote(self, monkeypatch, root):
        monkeypatch.setattr(_open, "_files", lambda where: [RemoteH5File(url_of(root, where))])


class TestRemoteZarr(Zarr):
    max_examples = 20

    def storages(self, layout, dtype):
        """Chunks that are not tiny, since each is a request; tiny ones are read from disk."""
        return (
            super()
            .storages(layout, dtype)
            .map(lambda each: replace(each, chunks=tuple(max(6, n) for n in each.chunks)))
        )

    test_in_worker_processes = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def remote(self, monkeypatch, root):
        def files(where):
            return [RemoteZarrStore(group) for group in anndata_groups(url_of(root, where))]

        monkeypatch.setattr(_open, "_files", files)


class TestRemoteTenx(Tenx):
    max_examples = 10
    test_in_worker_processes = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def remote(self, monkeypatch, root):
        monkeypatch.setattr(self, "where", lambda path: url_of(root, Location.of(path)))
