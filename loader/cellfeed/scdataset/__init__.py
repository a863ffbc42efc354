"""scDataset's interface: scripts that are written for it run after ``from cellfeed.scdataset``.

Names, parameters and attributes are those of scDataset 0.3; all else is as in `cellfeed`. "Moving
from another loader" in the documentation says what differs on purpose.
"""

import secrets
from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import sampling, strategies
from cellfeed.collection import count_indexable_rows
from cellfeed.extending import ParameterError, require_seed, require_torch
from cellfeed.sampling import sorted_indices
from cellfeed.scdataset._dataset import scDataset
from cellfeed.scdataset._indexables import MultiIndexable, adata_to_mindex, hf_tahoe_to_tensor

__all__ = [
    "BlockShuffling",
    "BlockWeightedSampling",
    "ClassBalancedSampling",
    "MultiIndexable",
    "SamplingStrategy",
    "Streaming",
    "adata_to_mindex",
    "bionemo_to_tensor",
    "hf_tahoe_to_tensor",
    "scDataset",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in ("estimate_sample_size", "suggest_parameters"):
            msg = f"{__name__} has no `{name}`, since settings are measured: run `autotune`"
            raise ImportError(msg)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _key(seed: int | None, rng: np.random.Generator | None) -> int:
    if rng is not None:
        seed = int(rng.integers(2**63))
    return sampling.derive_key(secrets.randbits(63) if seed is None else require_seed(seed), 0)


class SamplingStrategy(sampling.SamplingStrategy, ABC):
    """Base class of strategies of your own that are written for scDataset.

    An epoch visits what `get_indices` returns, with a seed that depends on the epoch. Every reading
    process keeps these indices, 8 bytes each. A strategy of `cellfeed.sampling` keeps none, and
    all strategies here are such.

    Parameters
    ----------
    indices
        Rows to visit, kept as ``_indices``, ascending; None for all rows.

    Examples
    --------
    >>> class Reversed(SamplingStrategy):
    ...     def get_indices(self, data_collection, seed=None, rng=None):
    ...         return np.arange(len(data_collection))[::-1]
    >>> [batch.tolist() for batch in scDataset(np.arange(5), Reversed(), 2, fetch_factor=1)]
    [[4, 3], [2, 1], [0]]
    """

    _shuffle_before_yield: bool | None = None
    _indices: NDArray[np.int64] | None = None
    _bound: "_Bound | None" = None

    def identity(self) -> Any:
        """Return its attributes, but for the collection that it is bound to."""
        return {name: value for name, value in vars(self).items() if name != "_bound"}

    def __init__(self, indices: ArrayLike | None = None) -> None:
        self._indices = sorted_indices(indices)

    @abstractmethod
    def get_indices(
        self,
        data_collection: Any,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> NDArray[np.intp]:
        """Return the rows of an epoch, in order.

        Parameters
        ----------
        data_collection
            The collection.
        seed
            Seed of the epoch, 32 bits.
        rng
            A generator, in place of ``seed``.
        """

    def get_len(self, data_collection: Any) -> int:
        """Return the number of rows in an epoch; by default, of those with seed 0."""
        return len(self.get_indices(data_collection, seed=0))

    def _get_rng(
        self, seed: int | None = None, rng: np.random.Generator | None = None
    ) -> np.random.Generator:
        """Return the generator, or one with this seed."""
        return np.random.default_rng(seed) if rng is None else rng

    @property
    def shuffles_fetch(self) -> bool:
        """Whether ``_shuffle_before_yield`` is set."""
        return bool(self._shuffle_before_yield)

    def bound_to(self, collection: Any) -> "SamplingStrategy":
        """Return the strategy with the collection that `get_indices` needs."""
        bound = copy(self)
        vars(bound)["_bound"] = _Bound(collection)
        return bound

    def n_positions(self, n_rows: int) -> int:
        """Return the number of rows in an epoch."""
        return int(self.get_len(self._collection_of(n_rows)))

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> sampling.EpochOrder:
        """Return the order of one epoch."""
        found = self.get_indices(self._collection_of(n_rows), seed=epoch_key % 2**32)
        rows = np.asarray(found, np.int64)
        n = self.n_positions(n_rows)
        if rows.shape != (n,) or rows.min(initial=0) < 0 or rows.max(initial=0) >= n_rows:
            msg = (
                f"`{type(self).__name__}.get_indices` must return {n:,} rows (`get_len`) below "
                f"{n_rows:,}, but got shape {rows.shape} with values from {rows.min(initial=0)} "
                f"to {rows.max(initial=0)}"
            )
            raise ParameterError(msg)
        return lambda positions: rows[positions]

    def _collection_of(self, n_rows: int) -> Any:
        return range(n_rows) if self._bound is None else self._bound.collection


class _Bound:
    """A collection, which does not identify a strategy."""

    def __init__(self, collection: Any) -> None:
        self.collection = collection


class _WithIndices(sampling.SamplingStrategy):
    """What scDataset's strategies offer in addition."""

    def get_len(self, data_collection: Any) -> int:
        """Return the number of rows in an epoch of a collection."""
        return self.n_positions(count_indexable_rows(data_collection))

    def get_indices(
        self,
        data_collection: Any,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> NDArray[np.intp]:
        """Return the rows of an epoch, in order, int64, shape (n,); 8 bytes for each.

        The order differs from scDataset's.

        Parameters
        ----------
        data_collection
            The collection.
        seed
            Determines the order; random if None.
        rng
            A generator, which draws the seed.
        """
        n_rows = count_indexable_rows(data_collection)
        bound = self.bound_to(data_collection)
        order = bound.epoch_order(n_rows=n_rows, epoch_key=_key(seed, rng))
        rows: NDArray[np.intp] = order(np.arange(bound.n_positions(n_rows)))
        return rows


class Streaming(_WithIndices, sampling.Streaming):
    """`cellfeed.Streaming` with scDataset's methods."""


class BlockShuffling(_WithIndices, sampling.BlockShuffling):
    """`cellfeed.BlockShuffling` with scDataset's methods."""


class BlockWeightedSampling(_WithIndices, strategies.BlockWeightedSampling):
    """`cellfeed.BlockWeightedSampling` with scDataset's methods; ``weights`` sum to 1."""

    def __post_init__(self) -> None:
        """Check the parameters; sum the weights."""
        super().__post_init__()
        if self.weights is not None:
            weights = np.asarray(self.weights, np.float64)
            object.__setattr__(self, "weights", weights / weights.sum())


class ClassBalancedSampling(_WithIndices, strategies.ClassBalancedSampling):
    """`cellfeed.ClassBalancedSampling` with scDataset's methods and ``weights``."""

    @property
    def weights(self) -> NDArray[np.float64]:
        """Weight of each label, 0 for missing ones; they sum to 1."""
        codes = np.asarray(self.labels)
        counts = np.bincount(codes[codes >= 0])
        weights = np.where(codes >= 0, 1 / np.maximum(counts, 1)[codes], 0)
        found: NDArray[np.float64] = weights / weights.sum()
        return found


for _strategy in (Streaming, BlockShuffling, BlockWeightedSampling, ClassBalancedSampling):
    SamplingStrategy.register(_strategy)


def bionemo_to_tensor(data_collection: Any, idx: Any) -> Any:
    """Read rows of BioNeMo's ``SingleCellMemMapDataset`` as a dense tensor: a ``fetch_callback``.

    `cellfeed.open_collection` reads its folder far faster.

    Parameters
    ----------
    data_collection
        The dataset.
    idx
        A row, a slice, or rows.

    Returns
    -------
    Float tensor, shape (n_rows, n_genes).

    Raises
    ------
    ImportError
        torch or bionemo-scdl is not installed.
    """
    require_torch("`bionemo_to_tensor`")
    from bionemo.scdl.util.torch_dataloader_utils import (  # noqa: PLC0415
        collate_sparse_matrix_batch,
    )

    rows = np.atleast_1d(np.arange(len(data_collection))[idx])
    return collate_sparse_matrix_batch([data_collection[int(row)] for row in rows]).to_dense()
