"""h5ad and zarr on a web server pass the suite of sources."""

from dataclasses import replace

import pytest
from tests.loader.bytes.remote.faulty import PATIENT
from tests.loader.sources.test_conformance import TestH5ad as H5ad
from tests.loader.sources.test_conformance_zarr import TestZarr as Zarr

from cellfeed import open_collection

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:zarr v3 autosharding:UserWarning"),
]


class OnServer:
    """What is written is opened on the server."""

    max_examples = 20
    test_in_worker_processes = None  # which are forked

    @pytest.fixture(autouse=True)
    def url_of(self, url_of):
        self._url_of = url_of

    def opened(self, stored, case):
        (source,) = open_collection(
            self._url_of(stored), elements=[case.element], storage_options=PATIENT
        ).sources
        return source


class TestRemoteH5ad(OnServer, H5ad):  # type: ignore[misc]
    pass


class TestRemoteZarr(OnServer, Zarr):  # type: ignore[misc]
    def storages(self, layout, dtype):
        """Chunks that are not tiny, since each is a request; tiny ones are read from disk."""
        return (
            super()
            .storages(layout, dtype)
            .map(lambda each: replace(each, chunks=tuple(max(6, n) for n in each.chunks)))
        )
