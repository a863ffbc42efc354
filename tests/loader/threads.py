"""The threads that cellfeed has left in this process."""

import gc
import threading

import pytest

from cellfeed.dataset._run import wait_for_dropped

__all__ = ["no_iteration_of_other_tests", "threads_of_iterations", "wait_for_dropped"]


@pytest.fixture(autouse=True, scope="module")
def no_iteration_of_other_tests():
    """Iterations in what tests of other modules have left as garbage end before."""
    gc.collect()
    wait_for_dropped()


def threads_of_iterations() -> list[str]:
    """Return threads of cellfeed, but for those that last as long as the process."""
    names = [thread.name for thread in threading.enumerate()]
    names_of_lasting = ("requests", "cached", "parquet", "postgres")
    lasting = tuple(f"cellfeed-{name}" for name in names_of_lasting)
    return [name for name in names if name.startswith("cellfeed") and not name.startswith(lasting)]
