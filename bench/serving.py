"""An epoch read from a web server on this machine: the requests, and what they cost."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

from bench._profile import _Measured, parameters
from bench._stores import N_CELLS, Stored
from cellfeed import BlockShuffling, CellDataset, open_collection

sys.path.append(str(Path(__file__).parents[1]))  # for the servers of the tests


class Served(Stored, _Measured):
    """Read an epoch over HTTP."""

    params = parameters(quick=[16], full=[1, 64])
    param_names = ("block_size",)

    def setup(self, stores, block_size):
        from tests.servers.web import WebServer  # noqa: PLC0415 - once the path is known

        self.pages = tempfile.mkdtemp()
        # Every server is new, except for its port.
        self.environment = mock.patch.dict(os.environ, CELLFEED_CACHE_DIR=self.pages)
        self.environment.start()
        folder = stores["CSR gzip"]
        self.server = WebServer(folder)
        self.server.__enter__()
        urls = [f"{self.server.url}/{path.name}" for path in sorted(folder.glob("*.h5ad"))]
        collection = open_collection(urls, obs=["plate"])
        collection.load_tables()
        self.n_opening = len(self.server.requests)
        strategy = BlockShuffling(block_size=block_size)
        self.dataset = CellDataset(collection, strategy, 64, 16, seed=0)
        self.loader = self.dataset.loader()

    def teardown(self, *_):
        self.server.close()
        shutil.rmtree(self.pages, ignore_errors=True)
        self.environment.stop()

    def run(self, *_):
        for _minibatch in self.loader:
            pass

    def track_opening_requests(self, *_):
        """Requests until the locations of chunks are known."""
        return self.n_opening

    track_opening_requests.unit = "requests"

    def track_requests(self, *_):
        return self.received()[0]

    track_requests.unit = "requests per epoch"

    def track_bytes(self, *_):
        """Bytes received, with those of gaps between ranges that are requested together."""
        return self.received()[1] / N_CELLS

    track_bytes.unit = "bytes per cell"

    def received(self):
        """Return an epoch's requests and their bytes."""
        self.dataset.set_epoch(0)
        n_before = len(self.server.requests)
        self.run()
        requests = self.server.requests[n_before:]
        return len(requests), sum(each.sent for each in requests)
