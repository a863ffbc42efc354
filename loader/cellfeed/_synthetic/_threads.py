"""Writing several plates concurrently.

Threads suffice, since almost all of the time is spent drawing and compressing, outside the GIL
and HDF5's lock. Unlike processes, they start immediately and demand nothing of the caller.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from cellfeed._synthetic._expression import ExpressionModel
from cellfeed._synthetic._plate import write_plate

__all__ = ["write_plates"]

_POLL_SECONDS = 0.2


def write_plates(
    model: ExpressionModel,
    paths: Mapping[int, Path],
    on_progress: Callable[[int], None],
    n_threads: int,
) -> None:
    """Write plates; if one fails, or the caller is interrupted, stop them all.

    Parameters
    ----------
    model
        The expression in the collection.
    paths
        Path of each plate, by its number.
    on_progress
        Called in the calling thread, with the number of cells written so far.
    n_threads
        Number of plates that are written concurrently.
    """
    work = _Work(model, paths)
    with ThreadPoolExecutor(n_threads) as pool:
        pending = {pool.submit(work.write, plate) for plate in paths}
        try:
            while pending:
                done, pending = wait(pending, timeout=_POLL_SECONDS)
                for future in done:
                    future.result()
                on_progress(sum(work.n_written.values()))
        except BaseException:
            work.cancelled.set()
            raise


class _Work:
    """State shared by the threads."""

    def __init__(self, model: ExpressionModel, paths: Mapping[int, Path]) -> None:
        self.cancelled = threading.Event()
        self.n_written = dict.fromkeys(paths, 0)
        self._model = model
        self._paths = paths

    def write(self, plate: int) -> None:
        def count(n_cells: int) -> None:
            if self.cancelled.is_set():
                raise CancelledError
            self.n_written[plate] += n_cells

        # The thread that cancelled reports why; and after a failure HDF5 is better left alone.
        with suppress(CancelledError):
            count(0)
            try:
                write_plate(self._model, plate, self._paths[plate], count)
            except Exception:
                self.cancelled.set()
                raise
