"""Making sparse rows of minibatches dense, some minibatches ahead of their use."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from cellfeed._buffers import BufferPool
from cellfeed._cells import Cells, CsrRows
from cellfeed._chunks import Counter, Counters
from cellfeed._layouts import DenseGroup
from cellfeed._reading._prefetch import ahead
from cellfeed._reading._transforms import ElementTransforms

__all__ = ["Densifier"]


class Densifier:
    """Makes rows dense, in its own threads, which do not wait for decoding.

    Parameters
    ----------
    n_threads
        Number of threads, and of groups that they make ahead.
    pool
        Pool for the memory of dense rows.
    transforms
        Transforms of dense rows, by element.
    counters
        Counters of time.
    """

    def __init__(
        self,
        n_threads: int,
        pool: BufferPool,
        transforms: Mapping[str, ElementTransforms],
        counters: Counters,
    ) -> None:
        self._n_threads, self._pool = n_threads, pool
        self._transforms, self._counters = transforms, counters
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="cellfeed-dense")

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def groups(self, groups: Iterator[Cells], *, first_alone: bool) -> Iterator[Cells]:
        """Iterate over groups with dense elements.

        Parameters
        ----------
        groups
            Groups with rows of any layout.
        first_alone
            Whether the first group arrives before any other group is available.
        """
        if first_alone:
            yield from map(self._made_dense, islice(groups, 1))
        yield from ahead(self._made_dense, groups, self._threads, self._n_threads)

    def _made_dense(self, cells: Cells) -> Cells:
        with self._counters.wall_time(Counter.DENSIFYING):
            elements = {name: self._dense_rows(name, rows) for name, rows in cells.items()}
        return Cells(elements, cells.obs, cells.rows)

    def _dense_rows(self, name: str, rows: Any) -> Any:
        if not isinstance(rows, CsrRows):
            return rows
        group = DenseGroup(len(rows.indptr) - 1, (rows.n_vars,), rows.data.dtype)
        memory = self._pool.acquire(group.n_bytes)
        dense = group.over(memory)
        rows.densify_into(dense)
        if name in self._transforms:
            self._transforms[name].dense.apply([group.located(memory)])
        return dense
