"""Fixtures of storages; and what the suites for sources start in processes is marked so."""

import pytest
from tests.loader.storages.zarr_cells import write_cells


def pytest_itemcollected(item):
    if getattr(item, "originalname", "") == "test_in_worker_processes":
        item.add_marker(pytest.mark.process)


@pytest.fixture
def new_store(new_path):
    """Return a function that writes a zarr store of its own with each call."""
    return lambda X, /, **options: write_cells(new_path(".zarr"), X, **options)
