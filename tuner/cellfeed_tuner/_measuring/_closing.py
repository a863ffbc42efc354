"""Ending an epoch before all of it came out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["closed_at_the_end"]


@contextmanager
def closed_at_the_end(minibatches: Iterator[Any]) -> Iterator[None]:
    """Wait at the end of the block until nothing is under way any more for an iterator.

    Dropped, cellfeed's would end in a thread, while the next epoch is timed. Of other loaders,
    which have nothing to close, dropping ends what there is.
    """
    try:
        yield
    finally:
        if hasattr(minibatches, "close"):
            minibatches.close()
