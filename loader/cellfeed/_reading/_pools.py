"""Where the memory of rows comes from."""

from dataclasses import dataclass, field

from cellfeed._buffers import BufferPool, SharedPool

__all__ = ["Pools"]


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """Pools of memory, for what is read and for what is made of it.

    Parameters
    ----------
    sparse
        For sparse rows.
    others
        For rows of other layouts.
    dense
        For sparse rows that are made dense: pieces of one size, which others would take the
        place of.
    """

    sparse: BufferPool = field(default_factory=BufferPool)
    others: BufferPool = field(default_factory=BufferPool)
    dense: BufferPool = field(default_factory=BufferPool)

    def lending(self, shared: SharedPool, *, dense: bool) -> "Pools":
        """Return the same, where rows that leave lie in memory that is lent.

        Parameters
        ----------
        shared
            Where that comes from.
        dense
            Whether sparse rows are made dense, so that they do not leave.
        """
        return Pools(self.sparse if dense else shared, shared, shared)
