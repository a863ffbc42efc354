"""A source of another package whose chunks lie in an object store; public names alone."""

import itertools
import zlib

import numpy as np
import pytest
from tests.loader.storages.arriving import Arriving
from tests.loader.storages.expecting import Csr

from cellfeed import ParameterError
from cellfeed.sources import (
    ByteStore,
    ChunkedArray,
    ChunkedDense,
    ChunkTable,
    Location,
    StoredElement,
    chunk_codec,
)
from cellfeed.testing import SourceConformance


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
    pieces = []
    grid = [range(0, n, c) for n, c in zip(values.shape, chunk_shape, strict=True)]
    for corner in itertools.product(*grid):
        part = values[tuple(slice(k, k + c) for k, c in zip(corner, chunk_shape, strict=True))]
        chunk = np.zeros(chunk_shape, values.dtype)
        chunk[tuple(map(slice, part.shape))] = part
        pieces.append(zlib.compress(chunk.tobytes()))
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    table = ChunkTable(np.cumsum(sizes) - sizes, sizes, np.zeros(len(sizes), np.uint8))
    return ChunkedArray(
        name=url.rpartition("/")[2],
        shape=values.shape,
        dtype=values.dtype,
        chunk_shape=chunk_shape,
        codec=chunk_codec("zlib"),
        locations=table,
        files=Bucket(url, b"".join(pieces)),
    )


class Dense(ChunkedDense):
    var_names = Csr.var_names


class TestChunksInABucket(SourceConformance):
    max_examples = 15

    def is_decoded_here(self, case):
        return True

    @pytest.fixture
    def write(self, new_path):
        def write(case):
            url = f"bucket://cases/{new_path().name}"
            if case.layout == "dense":
                element: StoredElement = Dense(chunked(f"{url}/X", case.dense, (7, 4)))
            else:
                indices = chunked(f"{url}/indices", case.indices, (11,))
                data = chunked(f"{url}/data", case.data, (13,))
                element = Csr(case.indptr.astype(np.int64), indices, data, case.n_vars)
            return Arriving(Location(url), {"X": element}, case.obs)

        return write


def test_a_codec_that_is_not_known():
    with pytest.raises(ParameterError, match=r"^`codec` must be one of 'none', .*, but got 'rar'$"):
        chunk_codec("rar")
