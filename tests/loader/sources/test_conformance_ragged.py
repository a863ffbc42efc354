"""Rows of any length pass the suite: those that arrive, and those in chunks and in shards."""

import numpy as np
import pytest
from tests.loader.sources.arriving import Arriving
from tests.loader.sources.suites import Suite
from tests.loader.sources.test_chunked_sources import chunked

from cellfeed.sources import ChunkedRagged, Location, RaggedRows, StoredElement, expand
from cellfeed.testing import SourceConformance


class Ragged(StoredElement):
    """Rows in memory, whose lengths are told before they are read, or not."""

    layout = "ragged"
    var = None

    def __init__(self, rows, tells_lengths):
        self._rows, self._tells_lengths = rows, tells_lengths
        self.shape, self.dtype = rows.shape, rows.dtype

    def row_lengths(self, runs):
        return self._rows.lengths[expand(runs)] if self._tells_lengths else None

    def read_rows(self, runs):
        return self._rows[expand(runs)]


def rows_of(case):
    return RaggedRows(case.indptr.astype(np.int64), case.data)


class TestInMemory(SourceConformance):
    layouts = ("ragged",)
    dtypes = ("<f4", "<f2", "|b1", "|u1", "<u2", "<i8")
    max_examples = 8

    @pytest.fixture(params=[True, False], ids=["known", "arriving"])
    def write(self, request, new_path):
        def write(case):
            element = Ragged(rows_of(case), request.param)
            where = Location(f"memory://{new_path().name}")
            return Arriving(where, {case.element: element}, case.obs)

        return write


class TestInChunks(Suite):
    layouts = ("ragged",)
    max_examples = 8
    decoded_here = True

    def stored(self, path, case):
        url, rows = f"bucket://cases/{path.name}", rows_of(case)
        element = ChunkedRagged(rows.offsets, chunked(url, rows.values, (13,)))
        return Arriving(Location(url), {case.element: element}, case.obs)
