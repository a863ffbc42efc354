"""Files of 10x Genomics on a web server pass the suite of sources."""

import pytest
from tests.loader.bytes.remote.test_conformance_remote import OnServer
from tests.loader.storages.tenx.test_conformance_tenx import TestTenx as Tenx

from cellfeed.sources import Location

pytestmark = pytest.mark.slow


class TestRemoteTenx(OnServer, Tenx):  # type: ignore[misc]
    max_examples = 10

    def opened(self, stored, case):
        return Tenx.opened(self, Location(self._url_of(stored)), case)
