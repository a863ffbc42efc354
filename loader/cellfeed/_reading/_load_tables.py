"""Row pointers and chunk tables of many sources, read side by side."""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from cellfeed._progress import ProgressLine
from cellfeed._sources import Source
from cellfeed.machine import usable_cpu_count

__all__ = ["load_tables"]

_POLL_SECONDS = 0.2


def load_tables(sources: Sequence[Source]) -> None:
    """Have each source read its tables, some at a time; see `Source.load_tables`.

    A line on the terminal tells how far this has come where it takes more than two seconds.

    Raises
    ------
    FormatError
        A source is damaged; the first of those that were found.
    """
    if not sources:
        return
    n_threads = min(len(sources), usable_cpu_count())
    with (
        ThreadPoolExecutor(n_threads, thread_name_prefix="cellfeed-tables") as threads,
        ProgressLine() as line,
    ):
        jobs = [threads.submit(source.load_tables) for source in sources]
        try:
            n_left = len(jobs)
            while n_left:
                ended, left = wait(jobs, _POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for job in jobs:
                    if job in ended:
                        job.result()
                n_left = len(left)
                line.show(f"Reading where rows lie: {len(ended)} of {len(jobs)} files")
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
