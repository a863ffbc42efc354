"""Rows in storage order."""

from dataclasses import dataclass

from numpy.typing import ArrayLike

from cellfeed.sampling._base import EpochOrder, SamplingStrategy
from cellfeed.sampling._indices import among, n_available, sorted_indices

__all__ = ["Streaming"]


@dataclass(frozen=True, eq=False)
class Streaming(SamplingStrategy):
    """Visit the rows in storage order.

    Parameters
    ----------
    indices
        The rows to visit, one-dimensional integers; all rows if None. They are sorted, with
        a warning if they were not.
    shuffle
        Whether the rows of a fetch are delivered in random order (a shuffle buffer of
        ``batch_size * fetch_factor`` rows).

    Examples
    --------
    >>> Streaming(indices=[3, 5, 8]).n_positions(n_rows=10)
    3
    """

    indices: ArrayLike | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        """Check and sort the indices."""
        object.__setattr__(self, "indices", sorted_indices(self.indices))

    @property
    def shuffles_fetch(self) -> bool:
        """Whether the rows of a fetch are delivered in random order."""
        return self.shuffle

    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows that an epoch visits."""
        return n_available(self.indices, n_rows)

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Return the storage order, which is the same in every epoch."""
        del n_rows, epoch_key
        return among(self.indices, lambda positions: positions)
