"""What the suites for sources start in processes is marked so, wherever they are inherited."""

import pytest


def pytest_itemcollected(item):
    if getattr(item, "originalname", "") == "test_in_worker_processes":
        item.add_marker(pytest.mark.process)
