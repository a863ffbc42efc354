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


class _FixedGap:
    """Stands in for the measurement of the link to a server."""

    def __init__(self, gap):
        self.worthwhile_gap = gap

    def record(self, *_):
        pass


class Served(Stored, _Measured):
    """Read an epoch over HTTP; bytes of gaps depend on the machine, and are not counted."""

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
        """Requests if only adjacent ranges are joined."""
        return self.read_with_gaps(0)[0]

    track_requests.unit = "requests per epoch"

    def track_bytes(self, *_):
        return self.read_with_gaps(0)[1] / N_CELLS

    track_bytes.unit = "bytes per cell"

    def track_requests_over_gaps(self, *_):
        """Requests if ranges up to 64 KiB apart are joined."""
        return self.read_with_gaps(1 << 16)[0]

    track_requests_over_gaps.unit = "requests per epoch"

    def track_amplification(self, *_):
        """Bytes with such gaps, over bytes without."""
        return self.read_with_gaps(1 << 16)[1] / self.read_with_gaps(0)[1]

    track_amplification.unit = "bytes received per byte wanted"

    def read_with_gaps(self, gap):
        """Return an epoch's requests and their bytes, joining ranges up to this far apart."""
        from cellfeed.bytes._remote import _scheduler  # noqa: PLC0415 - where obstore is

        _scheduler.scheduler_of(self.dataset.collection.locations[0]).link = _FixedGap(gap)
        self.dataset.set_epoch(0)
        n_before = len(self.server.requests)
        self.run()
        asked = self.server.requests[n_before:]
        return len(asked), sum(request.sent for request in asked)
