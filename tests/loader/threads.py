"""The threads that cellfeed has left in this process."""

import threading

from cellfeed._dataset._epochs import wait_for_dropped

__all__ = ["threads_of_iterations", "wait_for_dropped"]


def threads_of_iterations() -> list[str]:
    """Return threads of cellfeed, but for those that every later request to a server is made by."""
    names = [thread.name for thread in threading.enumerate()]
    lasting = ("cellfeed-requests", "cellfeed-cached", "cellfeed-postgres", "cellfeed-unbuffered")
    return [name for name in names if name.startswith("cellfeed") and not name.startswith(lasting)]
