"""Reading row pointers and chunk tables of many matrices concurrently."""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait

from cellfeed._bytes import threads_until_left
from cellfeed._progress import ProgressLine
from cellfeed._remote import outside_lock
from cellfeed._sources import StoredElement
from cellfeed.machine import usable_cpu_count

__all__ = ["load_tables"]

_POLL_SECONDS = 0.2
_AT_ONCE = 16


def load_tables(elements: Sequence[StoredElement], *, are_remote: bool = False) -> None:
    """Make each element read its tables, several concurrently; see `StoredElement.load_tables`.

    After two seconds, progress is shown on the terminal.

    Parameters
    ----------
    elements
        Elements of any sources.
    are_remote
        Whether reading them is limited by latency, not by the processor.

    Raises
    ------
    FormatError
        A table is damaged; the first one that was found.
    """
    if not elements:
        return
    n_threads = min(len(elements), _AT_ONCE if are_remote else usable_cpu_count())
    with (
        threads_until_left(n_threads, "cellfeed-tables") as threads,
        ProgressLine() as line,
    ):
        jobs = [threads.submit(outside_lock, each.load_tables) for each in elements]
        try:
            n_left = len(jobs)
            while n_left:
                ended, left = wait(jobs, _POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for job in jobs:
                    if job in ended:
                        job.result()
                n_left = len(left)
                line.show(
                    f"Reading row pointers and chunk tables: {len(ended)} of {len(jobs)} matrices"
                )
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
