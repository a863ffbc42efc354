"""The threads that cellfeed has left in this process."""

import threading

from cellfeed._dataset._epochs import wait_for_dropped

__all__ = ["threads_of_iterations", "wait_for_dropped"]


def threads_of_iterations() -> list[str]:
    """Return threads of cellfeed, but for those that last as long as the process."""
    names = [thread.name for thread in threading.enumerate()]
    names_of_lasting = ("requests", "cached", "parquet", "postgres")
    lasting = tuple(f"cellfeed-{name}" for name in names_of_lasting)
    return [name for name in names if name.startswith("cellfeed") and not name.startswith(lasting)]
