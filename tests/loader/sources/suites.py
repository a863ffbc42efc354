"""The suite of sources for what is written to a path."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import strategies as st
from tests.loader.guarded import GuardedPool

from cellfeed.bytes import BufferPool
from cellfeed.decode import Counter, Counters, Verify
from cellfeed.fetch import Pools, Reader
from cellfeed.testing import SourceConformance
from cellfeed.testing._source import Oracle, _collection, _distinct_rows, _drawn_dtype


class Suite(SourceConformance):
    """A subclass writes what is `storable` of each case, by `stored`.

    Attributes
    ----------
    suffix
        Of the names of files or folders.
    decoded_here
        What `is_decoded_here` says of every case: whether cellfeed must decode its chunks; None if
        both are allowed.
    """

    suffix = ""
    decoded_here: bool | None = None

    def cases(self, **options):
        return super().cases(**options).map(self.storable)

    def storable(self, case):
        """Return the case, or what of it can be stored."""
        return case

    def is_decoded_here(self, case):
        return self.decoded_here

    def stored(self, path, case):
        """Write a case; return the path, or an open source."""
        raise NotImplementedError

    def opened(self, stored, case):
        """Return what is read of it."""
        return stored

    @pytest.fixture
    def write(self, new_path):
        return lambda case: self.opened(self.stored(new_path(self.suffix), case), case)

    @pytest.fixture(autouse=True)
    def within_bounds(self, request, monkeypatch):
        """Nothing is written outside of the memory of rows."""
        pool = GuardedPool()
        if request.function.__name__ == "test_any_rows_in_any_order":
            monkeypatch.setattr(BufferPool, "acquire", lambda _, n_bytes: pool.acquire(n_bytes))
        yield
        pool.check()

    def test_chunks_and_the_library_give_the_same(self, write):
        """Reading by chunks or through the library gives the same bytes, with any threads.

        An element that is not read by chunks although others are gives a reason.
        """

        def check(case, data):
            collection = _collection(write, [case])
            stored = collection.sources[0].elements[case.element]
            dtype = _drawn_dtype(data, [case]) or stored.dtype
            oracle = Oracle([case], dtype, obs=collection.obs)

            def read(readable, rows, order, num_threads):
                """Read and check rows in two groups; return the numbers of bytes and chunks."""
                counters, pool = Counters(), GuardedPool()
                verify = data.draw(st.sampled_from(get_args(Verify)))
                options = {"num_threads": num_threads, "verify": verify, "counters": counters}
                size, pools = max(1, -(-rows.size // 2)), Pools(pool, pool, pool)
                with Reader(readable, dtype=dtype, pools=pools, **options) as reader:
                    groups = list(reader.read_groups(rows, order, size))
                pool.check()
                for k, group in enumerate(groups):
                    oracle.check(group, rows[order][k * size : (k + 1) * size])
                done = counters.values
                return int(done[Counter.BYTES_READ]), int(done[Counter.CHUNKS])

            rows = data.draw(_distinct_rows(case.n_rows))
            order = np.array(data.draw(st.permutations(range(len(rows)))), np.intp)
            assert read(ByLibrary(collection), rows, order, 1) == (0, 0)
            # Bytes and chunks depend on neither threads nor checks.
            num_threads = data.draw(st.integers(2, 4))
            assert read(collection, rows, order, 1) == read(collection, rows, order, num_threads)
            if case.row_lengths.sum():
                every = np.arange(case.n_rows)
                _, n_chunks = read(collection, every, every, 1)
                is_known, slow = self.is_decoded_here(case), stored.slow_read(dtype)
                assert slow is None or not n_chunks
                if dtype == stored.dtype:
                    assert is_known in (None, n_chunks > 0)
                if is_known is not None:
                    assert (slow is None) == (n_chunks > 0)

        self._try(check, case=self.cases(), data=st.data())


class ByLibrary:
    """A collection whose rows the storage's own library reads."""

    delivers_obs_names = False

    def __init__(self, collection):
        self.elements, self.obs = collection.elements, collection.obs
        self.obs_names = collection.obs_names
        self._collection = collection

    def parts(self, rows):
        parts = self._collection.parts(rows)
        for own in parts.values():
            own[:] = [replace(part, stored=WithoutChunks(part.stored)) for part in own]
        return parts


class WithoutChunks:
    """An element whose chunks cellfeed does not decode."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getattr__(self, name):
        return getattr(self._stored, name)

    def chunked(self):
        return None
