"""scDataset's interface: scripts that are written for it run after ``from cellfeed.scdataset``.

Names and parameters are those of scDataset 0.3; strategies are those of `cellfeed`, and all else is
as there. "Moving from another loader" in the documentation says what differs on purpose.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.dataset import CellDataset, require_callables
from cellfeed.sampling import BlockShuffling, SamplingStrategy, Streaming
from cellfeed.scdataset._indexables import MultiIndexable, adata_to_mindex, hf_tahoe_to_tensor
from cellfeed.strategies import BlockWeightedSampling, ClassBalancedSampling

__all__ = [
    "BlockShuffling",
    "BlockWeightedSampling",
    "ClassBalancedSampling",
    "MultiIndexable",
    "SamplingStrategy",
    "Streaming",
    "adata_to_mindex",
    "hf_tahoe_to_tensor",
    "scDataset",
]

_MEASURED = "since settings are measured: run `autotune`"
_GONE = {
    "bionemo_to_tensor": "since `cellfeed.open_collection` reads the folder of such a dataset",
    "estimate_sample_size": _MEASURED,
    "suggest_parameters": _MEASURED,
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _GONE:
            raise ImportError(f"{__name__} has no `{name}`, {_GONE[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class scDataset(CellDataset):  # noqa: N801 - its name there
    """`CellDataset` with functions that read rows and take minibatches, as scDataset has it.

    Parameters
    ----------
    data_collection
        ``collection`` of `CellDataset`, or anything with a length that a ``fetch_callback`` reads.
    strategy, batch_size, fetch_factor, drop_last
        See `CellDataset`.
    fetch_callback
        ``fetch_callback(data_collection, rows)`` reads rows (ascending, int64) in place of
        ``data_collection[rows]``. Fetches are then read one after another, and nothing is read
        ahead; ``dtype``, ``transform`` and ``read_options`` do not apply.
    fetch_transform
        See `CellDataset`.
    batch_callback
        ``batch_callback(transformed, indices)`` takes a minibatch from a fetch, in place of
        ``transformed[indices]``. With a `cellfeed.Collection`, the fetch is `cellfeed.Cells`, and
        `cellfeed.Cells` that it returns are yielded as a `cellfeed.Minibatch`.
    batch_transform, rank, world_size, seed
        See `CellDataset`.
    **options
        Other parameters of `CellDataset`.

    Examples
    --------
    >>> from cellfeed import Streaming
    >>> dataset = scDataset(data_collection=np.arange(10), strategy=Streaming(), batch_size=4)
    >>> [len(batch) for batch in dataset]
    [4, 4, 2]
    """

    sort_before_fetch = True

    def __init__(
        self,
        data_collection: Any,
        strategy: SamplingStrategy,
        batch_size: int,
        fetch_factor: int = 16,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - by place, as scDataset has it
        fetch_callback: Callable[[Any, NDArray[Any]], Any] | None = None,
        fetch_transform: Callable[[Any], Any] | None = None,
        batch_callback: Callable[[Any, NDArray[Any]], Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        require_callables(fetch_callback=fetch_callback, batch_callback=batch_callback)
        self.fetch_callback, self.batch_callback = fetch_callback, batch_callback
        super().__init__(
            data_collection,
            strategy,
            batch_size,
            fetch_factor,
            drop_last=drop_last,
            fetch_transform=fetch_transform,
            batch_transform=batch_transform,
            rank=rank,
            world_size=world_size,
            seed=seed,
            **options,
        )

    @property
    def _is_indexed(self) -> bool:
        return self.fetch_callback is None

    @property
    def _is_taken_here(self) -> bool:
        return self.batch_callback is None

    def _fetched(self, rows: NDArray[np.int64]) -> Any:
        if self.fetch_callback is None:
            return super()._fetched(rows)
        return self.fetch_callback(self.collection, rows)

    def _taken_from(self, fetched: Any, indices: NDArray[np.intp]) -> Any:
        if self.batch_callback is None:
            return super()._taken_from(fetched, indices)
        return self.batch_callback(fetched, indices)
