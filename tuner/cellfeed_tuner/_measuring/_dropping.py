"""Dropping pages of files from the page cache after a loader has used them."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cellfeed_tuner._constants import FETCHES_AHEAD, LEAST_MINIBATCHES_AHEAD, LOOKING_SHARE
from cellfeed_tuner._machine._page_cache import (
    CacheState,
    PageRuns,
    drop_clean_pages,
    resident_runs,
)

__all__ = ["Dropping", "rounds_ahead"]


def rounds_ahead(loader: object, minibatches_per_round: int) -> int:
    """Return after how many further rounds a loader has used everything it has read by now.

    Workers of a `torch.utils.data.DataLoader` hold minibatches.
    """
    held = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", 0) or 0)
    least = -(-LEAST_MINIBATCHES_AHEAD // minibatches_per_round)
    return max(FETCHES_AHEAD + -(-held // minibatches_per_round), least)


class Dropping:
    """Drops pages of files after they were used, where ``cache`` is "cold".

    A cold measurement stands for files larger than memory: a page that a fetch has used is gone
    when a later fetch needs it again, which may be one of the same epoch if chunks are larger than
    blocks. Pages that were read ahead stay, since they would otherwise be read twice.

    Pages are told apart by age, for any loader and in all of its processes: pages that are cached
    at the end of a round are used by the end of the rounds that are read ahead, and dropped then.
    They stay if newer pages lie beside them: those belong to a running fetch, which may use a chunk
    that begins on an older page. If the kernel does not report cached pages, they are dropped
    before each epoch only.

    Parameters
    ----------
    mapped
        Whether this process may have mapped the files; cellfeed never maps those of a collection.
    looking_share
        Share of the time that listing cached pages may take; large files are listed less often.
    """

    def __init__(
        self,
        files: Sequence[Path],
        cache: CacheState,
        *,
        mapped: bool = False,
        looking_share: float = LOOKING_SHARE,
    ) -> None:
        self._paths = files if cache == "cold" else ()
        self._mapped = mapped
        self._looking_share = looking_share
        # Rounds, and the pages of each file that were cached at their ends.
        self._listed = deque[tuple[int, Sequence[PageRuns]]]()
        self._round = 0
        self._next = 0.0

    def before_epoch(self) -> None:
        """Drop all pages, since nothing has been read ahead."""
        drop_clean_pages(self._paths, mapped=self._mapped)
        self._listed.clear()
        self._round = 0

    def after_round(self, rounds_ahead: int) -> None:
        """Drop pages that were cached so many rounds ago; see `rounds_ahead`."""
        self._round += 1
        if not self._paths or time.perf_counter() < self._next:
            return
        begin = time.thread_time()
        runs = [resident_runs(path) for path in self._paths]
        known = [each for each in runs if each is not None]
        if len(known) == len(runs):
            used = self._used(rounds_ahead)
            if used is not None:
                covered = [_covered(*each) for each in zip(known, used, strict=True)]
                drop_clean_pages(self._paths, covered, mapped=self._mapped)
            self._listed.append((self._round, known))
        taken = time.thread_time() - begin
        self._next = time.perf_counter() + taken / self._looking_share

    def _used(self, rounds_ahead: int) -> Sequence[PageRuns] | None:
        """Return the latest listed pages that have been used since, and forget them."""
        used = None
        while self._listed and self._listed[0][0] + rounds_ahead <= self._round:
            _, used = self._listed.popleft()
        return used


def _covered(runs: PageRuns, others: PageRuns) -> PageRuns:
    """Return the runs that lie within one of the others."""
    if not len(others):
        return others
    number = np.searchsorted(others[:, 0], runs[:, 0], side="right") - 1
    covered: PageRuns = runs[(number >= 0) & (runs[:, 1] <= others[number, 1])]
    return covered
