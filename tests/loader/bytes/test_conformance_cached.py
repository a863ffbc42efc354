"""The conformance suites once more, where an earlier opening cached tables."""

import itertools
import os
import time

import pytest
from tests.loader.storages.test_conformance import TestH5ad as H5ad
from tests.loader.storages.test_conformance import write_h5ad as write_h5ad_case
from tests.loader.storages.test_conformance_zarr import TestZarr as Zarr
from tests.loader.storages.test_conformance_zarr import (
    pytestmark,  # noqa: F401 - what writing zarr says
    write_store,
)

from cellfeed._bytes import _tables
from cellfeed._storages import open_sources
from cellfeed.sources import Location


def open_before(path, case):
    """Open what was written long ago, so that its tables are cached."""
    then = time.time() - 1000
    for file in [path, *path.rglob("*")]:
        os.utime(file, (then, then))
    for source in open_sources(Location.of(path), [case.element]):
        for element in source.elements.values():
            element.load_tables()


@pytest.fixture
def open_twice(tmp_path, monkeypatch):
    """Return a function that makes one that stores a case, and opens it."""
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_tables, "_FEWEST_ENTRIES", 1)
    numbers = itertools.count()

    def writing(store, suffix):
        def write(case):
            path = tmp_path / f"{next(numbers):05}{suffix}"
            store(path, case)
            open_before(path, case)
            return path

        return write

    yield writing
    assert [*(tmp_path / "cache" / "tables").glob("*.tables")]


class TestH5adOpenedBefore(H5ad):
    max_examples = 10

    @pytest.fixture
    def write(self, open_twice):
        return open_twice(write_h5ad_case, ".h5ad")


class TestZarrOpenedBefore(Zarr):
    max_examples = 10

    @pytest.fixture
    def write(self, open_twice):
        return open_twice(write_store, ".zarr")
