"""A source in memory, at a URL, whose store is told what to expect, and keeps record of it."""

import itertools
import threading
import weakref
import zlib

import numpy as np
import scipy.sparse as sp
from tests.loader.sources.arriving import Arriving

from cellfeed import Collection
from cellfeed.sources import ByteStore, ChunkedArray, ChunkedCsr, ChunkTable, Location, chunk_codec


class Coming:
    """What a store returns; it counts as long as it lives."""

    def __init__(self, n_bytes):
        self.n_bytes = n_bytes


class ExpectingStore(ByteStore):
    """One object, of which ranges are read.

    Attributes
    ----------
    expected, read
        The ranges of each call.
    alive
        How many expectations lived after each call, and their bytes.
    """

    def __init__(self, url, content):
        self.location, self.content = Location(url), content
        self.expected, self.read, self.alive = [], [], []
        self.fails_at = self.fails_to_expect_at = None  # the number of a call
        self.may_read = threading.Event()
        self.may_read.set()
        self._coming = []

    def __reduce__(self):
        return ExpectingStore, (str(self.location), self.content)

    def location_of(self, file):
        return self.location

    def sizes(self, files):
        return np.full(len(files), len(self.content), np.int64)

    @property
    def coming(self):
        """The expectations that live."""
        return [each for each in (ref() for ref in self._coming) if each is not None]

    def expect(self, files, offsets, sizes):
        if len(self.expected) == self.fails_to_expect_at:
            raise OSError("expecting failed")
        coming = Coming(int(sizes.sum()))
        self._coming.append(weakref.ref(coming))
        self.expected.append([*zip(offsets.tolist(), sizes.tolist(), strict=True)])
        self.alive.append((len(self.coming), sum(each.n_bytes for each in self.coming)))
        return coming

    def read_ranges(self, files, offsets, sizes):
        assert self.may_read.wait(600)
        if len(self.read) == self.fails_at:
            raise OSError("reading failed")
        self.read.append([*zip(offsets.tolist(), sizes.tolist(), strict=True)])
        return [self.content[first : first + size] for first, size in self.read[-1]]


class Csr(ChunkedCsr):
    def var_names(self):
        return np.array([f"gene{k}" for k in range(self.shape[1])], object)


def compressed(values, chunk_shape):
    """Return the chunks of an array, which are filled up with zeros."""
    pieces = []
    grid = [range(0, n, c) for n, c in zip(values.shape, chunk_shape, strict=True)]
    for corner in itertools.product(*grid):
        part = values[tuple(slice(k, k + c) for k, c in zip(corner, chunk_shape, strict=True))]
        chunk = np.zeros(chunk_shape, values.dtype)
        chunk[tuple(map(slice, part.shape))] = part
        pieces.append(zlib.compress(chunk.tobytes()))
    return pieces


def array_of(store, name, values, chunk_shape, pieces, first=0):
    """Return the array of chunks that lie one behind the other in the object of a store."""
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    offsets = first + np.cumsum(sizes) - sizes
    return ChunkedArray(
        name=name,
        shape=values.shape,
        dtype=values.dtype,
        chunk_shape=chunk_shape,
        codec=chunk_codec("zlib"),
        locations=ChunkTable(offsets, sizes, np.zeros(len(sizes), np.uint8)),
        files=store,
    )


def expecting(matrix, url="s3://bucket/cells", chunk_length=16):
    """Return a collection of a CSR matrix whose arrays lie one behind the other, and its store."""
    parts, chunk_shape = {"indices": matrix.indices, "data": matrix.data}, (chunk_length,)
    pieces = {name: compressed(values, chunk_shape) for name, values in parts.items()}
    store = ExpectingStore(url, b"".join(pieces["indices"] + pieces["data"]))
    firsts = {"indices": 0, "data": sum(map(len, pieces["indices"]))}
    indices, data = (
        array_of(store, name, values, chunk_shape, pieces[name], firsts[name])
        for name, values in parts.items()
    )
    element = Csr(matrix.indptr.astype(np.int64), indices, data, matrix.shape[1])
    return Collection([Arriving(Location(url), {"X": element})]), store


def matrix_of(n_rows=96, n_columns=30):
    return sp.random(n_rows, n_columns, density=0.3, format="csr", dtype=np.float32, random_state=0)
