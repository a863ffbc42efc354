"""A source of another package whose chunks lie in an object store; public names alone."""

import numpy as np
import pytest
from tests.loader.sources.arriving import Arriving
from tests.loader.sources.expecting import Csr, array_of, compressed
from tests.loader.sources.suites import Suite

from cellfeed import ParameterError
from cellfeed.sources import ByteStore, ChunkedDense, Location, StoredElement, chunk_codec


class Bucket(ByteStore):
    """One object, of which ranges are read."""

    def __init__(self, url, content):
        self._location, self._content = Location(url), content

    def location_of(self, file):
        return self._location

    def sizes(self, files):
        return np.full(len(files), len(self._content), np.int64)

    def read_ranges(self, files, offsets, sizes):
        ranges = zip(offsets.tolist(), sizes.tolist(), strict=True)
        return [self._content[first : first + size] for first, size in ranges]


def chunked(url, values, chunk_shape):
    """Compress chunks of an array, one behind the other."""
    pieces, name = compressed(values, chunk_shape), url.rpartition("/")[2]
    store = Bucket(url, b"".join(pieces))
    return array_of(store, name, values, chunk_shape, pieces)


class Dense(ChunkedDense):
    var_names = Csr.var_names


class TestChunksInABucket(Suite):
    max_examples = 15
    decoded_here = True

    def stored(self, path, case):
        url = f"bucket://cases/{path.name}"
        if case.layout == "dense":
            element: StoredElement = Dense(chunked(f"{url}/X", case.dense, (7, 4)))
        else:
            indices = chunked(f"{url}/indices", case.indices, (11,))
            data = chunked(f"{url}/data", case.data, (13,))
            element = Csr(case.indptr.astype(np.int64), indices, data, case.n_vars)
        return Arriving(Location(url), {"X": element}, case.obs)


def test_a_codec_that_is_not_known():
    with pytest.raises(ParameterError, match=r"^`codec` must be one of 'none', .*, but got 'rar'$"):
        chunk_codec("rar")
