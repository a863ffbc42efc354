"""Fixtures of tests that write many small stores."""

import pytest
from tests.loader.zarr_stores import in_this_thread


@pytest.fixture(scope="module")
def zarr_in_this_thread():
    """zarr waits for no other thread, which takes most of the time of writing small arrays."""
    with in_this_thread():
        yield


@pytest.fixture
def out(tmp_path):
    """Where a store is written."""
    return tmp_path / "out.zarr"
