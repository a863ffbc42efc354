"""A collection, and which rows of it are visited."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, Collection, ParameterError
from cellfeed_tuner._measuring._labels import label_codes

__all__ = ["Selected"]


@dataclass(frozen=True)
class Selected:
    """Rows of a collection, in the order of storage.

    Parameters
    ----------
    collection
        What has them.
    indices
        The rows; all of them if None.
    where
        The query that they fulfil; empty if they were given by number.
    """

    collection: Collection
    indices: NDArray[np.int64] | None = None
    where: str = ""

    @classmethod
    def of(
        cls, subject: "Collection | Selected", indices: ArrayLike | str | None = None
    ) -> "Selected":
        """Return some rows of a collection, checked and sorted as strategies do.

        Parameters
        ----------
        subject
            The collection; or what this returned, which is given back.
        indices
            The rows, or a query that they fulfil; all of them if None.

        Raises
        ------
        ParameterError
            They are not rows of the collection, or no row fulfils the query.
        ColumnError
            There is no column that the query names.
        """
        if isinstance(subject, Selected):
            return subject
        if isinstance(indices, str):
            rows = subject.where(indices)
            if not rows.size:
                msg = f"no cell fulfils the query {indices!r}; compare it with the values of obs"
                raise ParameterError(msg)
            return cls(subject, rows, indices)
        strategy = BlockShuffling(block_size=1, indices=indices)
        strategy.n_positions(len(subject))
        return cls(subject, None if indices is None else np.asarray(strategy.indices))

    def __len__(self) -> int:
        return len(self.collection) if self.indices is None else self.indices.size

    def blocks(self, block_size: int) -> BlockShuffling:
        """Return the strategy that visits them in blocks."""
        return BlockShuffling(block_size=block_size, indices=self.indices)

    def codes(self, label: str) -> NDArray[np.integer]:
        """Return a code for the label of each of them; see `label_codes`."""
        codes = label_codes(self.collection, label)
        return codes if self.indices is None else codes[self.indices]

    @cached_property
    def rows_per_chunk(self) -> float:
        """Mean number of them in a unit of storage that is read as a whole and holds any."""
        per_chunk = self.collection.rows_per_chunk
        if self.indices is None:
            return per_chunk
        chunks = (self.indices / per_chunk).astype(np.int64)
        return self.indices.size / (1 + np.count_nonzero(np.diff(chunks)))
