"""How much memory a delivered cell takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import Cells
from cellfeed._cells._minibatch import Minibatch
from cellfeed._collection import Collection
from cellfeed._dataset._cell_dataset import CellDataset
from cellfeed._errors import require_positive
from cellfeed._indexables import MultiIndexable, count_rows
from cellfeed._lazy import sp
from cellfeed._torch import HAS_TORCH, torch
from cellfeed.sampling import Streaming

__all__ = ["estimate_sample_size"]

_PARTS_OF_SPARSE = ("data", "indices", "indptr", "coords", "offsets")


def estimate_sample_size(
    collection: Any,
    n_samples: int = 16,
    fetch_callback: Callable[[Any, NDArray[Any]], Any] | None = None,
    fetch_transform: Callable[[Any], Any] | None = None,
    batch_callback: Callable[[Any, NDArray[Any]], Any] | None = None,
    batch_transform: Callable[[Any], Any] | None = None,
) -> int:
    """Return the mean memory of a cell in a minibatch, in bytes.

    For a `Collection` without functions that change its cells, this is the mean over up to 10,000
    row pointers. Otherwise, one minibatch of cells from all over the collection is read and
    measured.

    Parameters
    ----------
    collection
        See `CellDataset`.
    n_samples
        Number of cells in that minibatch; all cells if there are fewer.
    fetch_callback, fetch_transform, batch_callback, batch_transform
        The functions that will be given to `CellDataset`.

    Raises
    ------
    ParameterError
        ``n_samples`` is below one, or the collection cannot be read by row numbers.

    Examples
    --------
    >>> estimate_sample_size(np.zeros((1000, 50), np.float32))
    200
    """
    n_samples = require_positive("n_samples", n_samples)
    functions = (fetch_callback, fetch_transform, batch_callback, batch_transform)
    if isinstance(collection, Collection) and functions == (None,) * len(functions):
        return round(collection.mean_row_bytes())
    n_rows = count_rows(collection, is_indexed=fetch_callback is None)
    rows = np.unique(np.linspace(0, n_rows - 1, n_samples).astype(np.int64))
    dataset = CellDataset(
        collection,
        Streaming(rows),
        batch_size=rows.size,
        fetch_factor=1,
        fetch_callback=fetch_callback,
        fetch_transform=fetch_transform,
        batch_callback=batch_callback,
        batch_transform=batch_transform,
        rank=0,
        world_size=1,
        seed=0,
    )
    (minibatch,) = dataset
    return round(_n_bytes(minibatch) / rows.size)


def _n_bytes(value: Any) -> int:
    """Return the memory of all arrays and other values in a nested object, in bytes."""
    parts = _parts(value)
    if parts is not None:
        return sum(map(_n_bytes, parts))
    if isinstance(value, np.ndarray):
        return value.nbytes + sum(map(sys.getsizeof, value.flat if value.dtype.hasobject else ()))
    if HAS_TORCH and isinstance(value, torch.Tensor):
        return value.element_size() * value.numel()
    return sys.getsizeof(value)  # a data frame counts what it holds


def _parts(value: Any) -> Iterable[Any] | None:
    """Return the parts of a nested object; None for a single array or another value."""
    parts: Iterable[Any] | None = None
    if isinstance(value, Cells | Minibatch):
        parts = value.elements, value.obs, value.rows
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple | MultiIndexable):
        parts = value
    elif sp.issparse(value):
        parts = [getattr(value, name, ()) for name in _PARTS_OF_SPARSE]
    elif HAS_TORCH and isinstance(value, torch.Tensor) and value.layout == torch.sparse_csr:
        parts = value.crow_indices(), value.col_indices(), value.values()
    elif hasattr(value, "obsm"):  # AnnData
        layers = [array for name, array in value.layers.items() if name is not None]  # which is X
        parts = value.X, value.obs, layers, value.obsm
    return parts
