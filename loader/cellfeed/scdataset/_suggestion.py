"""Initial settings, computed from the size of a cell and the machine; nothing is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from cellfeed import Minibatch
from cellfeed.collection import Collection, count_rows
from cellfeed.extending import (
    HAS_TORCH,
    ParameterError,
    require_integer,
    require_positive,
    sp,
    torch,
    usable_cpu_count,
)
from cellfeed.machine import local_world_size, usable_memory_bytes
from cellfeed.rows import Cells
from cellfeed.sampling import Streaming
from cellfeed.scdataset._dataset import scDataset
from cellfeed.scdataset._indexables import MultiIndexable

# How much memory a delivered cell takes.

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
    dataset = scDataset(
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


_MOST_MINIBATCHES = 256  # of a fetch, as in the grid of `autotune`: more has rarely been faster
_MIB, _GIB = 1 << 20, 1 << 30


class SuggestedParameters(TypedDict):
    """The dictionary that `suggest_parameters` returns; sizes in MiB and GiB."""

    num_workers: int
    fetch_factor: int
    block_size_conservative: int
    block_size_balanced: int
    block_size_aggressive: int
    prefetch_factor: int | None
    estimated_memory_per_fetch_mb: float
    estimated_total_memory_mb: float
    system_info: dict[str, float]


def suggest_parameters(
    collection: Any,
    batch_size: int,
    *,
    target_ram_fraction: float = 0.2,
    max_workers: int = 16,
    min_workers: int = 0,
    verbose: bool = True,
    fetch_callback: Callable[[Any, NDArray[Any]], Any] | None = None,
    fetch_transform: Callable[[Any], Any] | None = None,
    batch_callback: Callable[[Any, NDArray[Any]], Any] | None = None,
    batch_transform: Callable[[Any], Any] | None = None,
) -> SuggestedParameters:
    """Suggest settings that fit into memory, without measuring speed.

    Use it for a first look at data; ``autotune`` measures speed on your disk and how well labels
    are mixed, and chooses the settings.

    Parameters
    ----------
    collection
        See `CellDataset`.
    batch_size
        Number of rows in a minibatch.
    target_ram_fraction
        Share of the currently free memory that fetches may take, in (0, 1].
    max_workers, min_workers
        Limits of the number of worker processes.
    verbose
        Whether to print the suggestion.
    fetch_callback, fetch_transform, batch_callback, batch_transform
        The functions that will be given to `CellDataset`.

    Returns
    -------
    A dictionary.

    - ``num_workers``: ``min_workers`` for a `Collection`, which threads read; otherwise half
      of the processors that this process may use.
    - ``fetch_factor``: as large as memory allows, at most 256, and small enough that each process
      gets a fetch. Memory holds two fetches, or three per worker.
    - ``block_size_conservative``, ``..._balanced``, ``..._aggressive``: a quarter, a half and all
      of the fetch factor. If each block has a single label, minibatches fall short of the labels'
      entropy by at most 1.25, 1.5 and 2 times as much as random minibatches do.
    - ``prefetch_factor``: minibatches for a DataLoader of torch, so that one fetch is queued while
      the next is read; None without workers. `CellDataset.loader` needs none.
    - ``estimated_memory_per_fetch_mb``, ``estimated_total_memory_mb``: in MiB.
    - ``system_info``: ``available_ram_gb`` and ``cpu_count`` for this process, without the shares
      of other ranks on this machine, and ``estimated_sample_size_bytes``, the size of a cell.

    Raises
    ------
    ParameterError
        A parameter is out of range, or the collection cannot be read by row numbers.

    Examples
    --------
    >>> import numpy as np
    >>> suggested = suggest_parameters(np.zeros((10_000, 200)), 64, verbose=False)
    >>> suggested["block_size_balanced"] <= suggested["fetch_factor"] <= 157
    True
    """
    batch_size = require_positive("batch_size", batch_size)
    _require_limits(target_ram_fraction, max_workers, min_workers)
    functions: dict[str, Any] = {
        "fetch_callback": fetch_callback,
        "fetch_transform": fetch_transform,
    }
    sample_bytes = estimate_sample_size(collection, **functions)
    if batch_callback or batch_transform:  # a fetch takes the one, its minibatches the other
        functions |= {"batch_callback": batch_callback, "batch_transform": batch_transform}
        sample_bytes = max(sample_bytes, estimate_sample_size(collection, **functions))
    n_ranks = local_world_size()
    n_cores = max(1, usable_cpu_count() // n_ranks)
    memory_bytes = usable_memory_bytes() / n_ranks
    is_read_by_threads = isinstance(collection, Collection) and fetch_callback is None
    num_workers = 0 if is_read_by_threads else n_cores // 2
    num_workers = min(max(num_workers, min_workers), max_workers)
    # The largest fetch factor that fits, of which each process gets a fetch.
    n_processes = max(1, num_workers)
    n_fetches = n_processes * (3 if num_workers else 2)  # in memory at once
    minibatch_bytes = max(1, batch_size * sample_bytes)
    n_fit = int(target_ram_fraction * memory_bytes / n_fetches / minibatch_bytes)
    n_of_each = -(-count_rows(collection, is_indexed=False) // (batch_size * n_processes))
    fetch_factor = max(1, min(n_fit, n_of_each, _MOST_MINIBATCHES))
    fetch_mb = fetch_factor * minibatch_bytes / _MIB
    suggested = SuggestedParameters(
        num_workers=num_workers,
        fetch_factor=fetch_factor,
        block_size_conservative=max(1, fetch_factor // 4),
        block_size_balanced=max(1, fetch_factor // 2),
        block_size_aggressive=fetch_factor,
        prefetch_factor=fetch_factor + 1 if num_workers else None,
        estimated_memory_per_fetch_mb=fetch_mb,
        estimated_total_memory_mb=fetch_mb * n_fetches,
        system_info={
            "available_ram_gb": memory_bytes / _GIB,
            "cpu_count": n_cores,
            "estimated_sample_size_bytes": sample_bytes,
        },
    )
    if verbose:
        print(_in_words(suggested))  # noqa: T201 - as it was asked for
    return suggested


def _require_limits(target_ram_fraction: float, max_workers: int, min_workers: int) -> None:
    if not 0 < target_ram_fraction <= 1:
        msg = f"`0 < target_ram_fraction <= 1` must hold, but got {target_ram_fraction=}"
        raise ParameterError(msg)
    for name, value in (("max_workers", max_workers), ("min_workers", min_workers)):
        require_integer(name, value)
    if not 0 <= min_workers <= max_workers:
        msg = f"`0 <= min_workers <= max_workers` must hold, but got {min_workers=}, {max_workers=}"
        raise ParameterError(msg)


def _in_words(suggested: SuggestedParameters) -> str:
    system = suggested["system_info"]
    sizes = [suggested["block_size_conservative"], suggested["block_size_balanced"]]
    return (
        f"{system['cpu_count']:g} processors, {system['available_ram_gb']:.1f} GiB of "
        f"free memory, {system['estimated_sample_size_bytes']:,.0f} bytes per "
        f"cell\nnum_workers={suggested['num_workers']}, "
        f"fetch_factor={suggested['fetch_factor']}: "
        f"{suggested['estimated_total_memory_mb']:,.0f} MiB\nblock_size={sizes[0]} to "
        f"{suggested['block_size_aggressive']}, such as {sizes[1]}: larger blocks read "
        "faster and mix less\nNothing was measured; `autotune` measures speed and "
        "mixing, and chooses."
    )
