"""A collection, and the rows of it that are visited."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, Collection, ParameterError, SamplingStrategy
from cellfeed_tuner._configuration import Setting
from cellfeed_tuner._constants import MOST_DRAWS, MOST_IN_BLOCKS
from cellfeed_tuner._entropy._minibatch_entropy import LabelCounts, count_labels
from cellfeed_tuner._subject._labels import Label, label_codes

__all__ = ["Selected"]


@dataclass(frozen=True)
class Selected:
    """Rows of a collection, in the order of storage; all rows if ``indices`` is None.

    ``where`` is the query that selected them, if there was one. ``strategy`` visits them, with any
    block size; in shuffled blocks if None.
    """

    collection: Collection
    indices: NDArray[np.int64] | None = None
    where: str = ""
    strategy: SamplingStrategy | None = None

    @classmethod
    def of(
        cls,
        subject: "Collection | Selected",
        indices: ArrayLike | str | None = None,
        strategy: SamplingStrategy | None = None,
    ) -> "Selected":
        """Return some rows of a collection, checked and sorted as strategies do.

        ``indices`` may be a query. A `Selected` is returned unchanged.

        Raises
        ------
        ParameterError
            They are not rows of the collection, no row matches the query, or the strategy has
            other rows, or does not fit the collection.
        ColumnError
            The query or the strategy names a column that does not exist.
        """
        if isinstance(subject, Selected):
            return subject
        where = indices if isinstance(indices, str) else ""
        if isinstance(indices, str):
            indices = subject.where(indices)
            if not indices.size:
                msg = f"no cell matches the query {where!r}; compare it with the values of obs"
                raise ParameterError(msg)
        if strategy is not None:
            strategy = _with_rows(strategy, indices).bound_to(subject)
            indices = getattr(strategy, "indices", None)
        rows = BlockShuffling(block_size=1, indices=indices)
        (strategy or rows).n_positions(len(subject))
        return cls(subject, None if indices is None else np.asarray(rows.indices), where, strategy)

    def __len__(self) -> int:
        return len(self.collection) if self.indices is None else self.indices.size

    def blocks(self, block_size: int, align: Setting = None) -> SamplingStrategy:
        """Return the strategy with a block size, if it has blocks."""
        if self.strategy is None:
            return BlockShuffling(
                block_size=block_size, indices=self.indices, align=cast(Any, align)
            )
        if not _has(self.strategy, "block_size"):
            return self.strategy
        resized: SamplingStrategy = replace(cast(Any, self.strategy), block_size=block_size)
        return resized

    def aligned(self, align: Setting) -> "Selected":
        """Return the same rows in blocks that are aligned with chunks, if ``align`` says so."""
        if align is None or self.strategy is not None:
            return self
        strategy = BlockShuffling(1, align=cast(Any, align))
        return Selected.of(self.collection, self.indices, strategy)

    def block_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the possible block sizes, or raise `ParameterError` if there are none.

        For a strategy of sets, sizes that divide a set; for one without blocks, 1.
        """
        if self.strategy is None:
            return sizes
        if not _has(self.strategy, "block_size"):
            return (1,)
        size = self.strategy.n_together
        if size == 1:
            return sizes
        fitting = [each for each in sizes if each < 1 or size % each == 0]
        if not fitting:
            msg = (
                f"a block size must divide the sets of {size} cells, but got {list(sizes)[:9]}; "
                f"choose from {[each for each in range(1, size + 1) if size % each == 0]}"
            )
            raise ParameterError(msg)
        return fitting

    @cached_property
    def n_drawn(self) -> int:
        """Cells that an epoch delivers."""
        return self.blocks(1).n_positions(len(self.collection))

    def drawn_rows(self) -> NDArray[np.int64]:
        """Return the rows that an epoch delivers, or evenly spaced ones of very many."""
        return self._rows_at(np.arange(0, self.n_drawn, self.rows_per_drawn), 1)

    @property
    def rows_per_drawn(self) -> int:
        """How many rows each of `drawn_rows` represents."""
        return -(-self.n_drawn // MOST_DRAWS)

    def rows_in_blocks(self, block_size: int) -> NDArray[np.int64]:
        """Return the rows of the first blocks of an epoch, block after block."""
        n = self.blocks(block_size).n_positions(len(self.collection))
        return self._rows_at(np.arange(min(n, max(block_size, MOST_IN_BLOCKS))), block_size)

    def _rows_at(self, positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
        order = self.blocks(block_size).epoch_order(n_rows=len(self.collection), epoch_key=0)
        return order(positions)

    def label(self, name: str, drawn_rows: NDArray[np.int64] | None = None) -> Label:
        """Return an obs column as a label, or raise `ColumnError` if there is nothing to mix.

        With ``drawn_rows``, it has codes of all cells of the collection.
        """
        codes, drawn = self.codes(name), None
        counted = count_labels(codes)
        if drawn_rows is not None:
            codes = label_codes(self.collection, name)
            if self.strategy is not None:
                found, times = count_labels(codes[drawn_rows]), self.rows_per_drawn
                drawn = LabelCounts(found.counts * times, found.n_missing * times)
        values = self.collection.obs[name].values
        known = values[np.isfinite(values)] if values.dtype.kind == "f" else values[:0]
        first, *others = self.collection.locations
        label = Label(name, codes, counted, drawn)
        label.check(
            f"obs column {name!r}",
            f" in {first}{' and the other files' if others else ''}",
            has_fractions=bool(np.any(known != np.floor(known))),
        )
        return label

    def codes(self, label: str) -> NDArray[np.integer]:
        """Return the code of each row's label; see `label_codes`."""
        codes = label_codes(self.collection, label)
        return codes if self.indices is None else codes[self.indices]

    @cached_property
    def rows_per_chunk(self) -> float:
        """Mean number of these rows in a chunk that holds any."""
        per_chunk = self.collection.rows_per_chunk
        if self.indices is None:
            return per_chunk
        chunks = (self.indices / per_chunk).astype(np.int64)
        return self.indices.size / (1 + np.count_nonzero(np.diff(chunks)))


def _has(strategy: SamplingStrategy, name: str) -> bool:
    """Return whether a strategy is a dataclass with a field of this name."""
    return name in getattr(strategy, "__dataclass_fields__", {})


def _with_rows(strategy: SamplingStrategy, indices: ArrayLike | None) -> SamplingStrategy:
    """Return a strategy that visits some rows only."""
    if indices is None:
        return strategy
    if not _has(strategy, "indices") or getattr(strategy, "indices", None) is not None:
        msg = (
            f"`indices` and a {type(strategy).__name__} that has rows of its own do not go "
            "together; give the strategy the indices"
        )
        raise ParameterError(msg)
    selected: SamplingStrategy = replace(cast(Any, strategy), indices=indices)
    return selected
