"""Pools for the memory of rows."""

from dataclasses import dataclass, field

from cellfeed._buffers import BufferPool, SharedPool

__all__ = ["Pools"]


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """Memory pools for rows that are read, and for rows that are made dense.

    Parameters
    ----------
    sparse
        Pool for sparse rows.
    others
        Pool for rows of other layouts.
    dense
        Pool for sparse rows that are made dense, whose buffers have equal sizes and would be
        displaced by others.
    """

    sparse: BufferPool = field(default_factory=BufferPool)
    others: BufferPool = field(default_factory=BufferPool)
    dense: BufferPool = field(default_factory=BufferPool)

    def lending(self, shared: SharedPool, *, dense: bool) -> "Pools":
        """Return the same pools, except that delivered rows are in shared memory.

        Parameters
        ----------
        shared
            The pool of shared memory.
        dense
            Whether sparse rows are made dense, so that they are not delivered themselves.
        """
        return Pools(self.sparse if dense else shared, shared, shared)
