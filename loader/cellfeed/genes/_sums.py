"""One pass over a collection: sums for each gene and batch, and for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.collection import Collection
from cellfeed.dataset import CellDataset
from cellfeed.extending import (
    ColumnError,
    FormatError,
    ParameterError,
    ProgressLine,
    pd,
    sp,
    usable_cpu_count,
)
from cellfeed.genes import _kernels
from cellfeed.machine import usable_memory_bytes
from cellfeed.rows import Cells
from cellfeed.sampling import Streaming
from cellfeed.splits import labels_of

_FETCH_BYTES = 64 << 20  # of cells that are read together
_CHUNKS = 4  # at least so many, each of whose cells are read together
_TASKS = 4  # for each thread, since ranges of genes differ in work


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batches:
    """The cells of a pass, and their batches.

    Parameters
    ----------
    rows
        Rows of the collection, ascending, int64; None for all of them.
    codes
        Batch of each of these cells, of the smallest integer dtype, shape (n_cells,).
    names
        Names of the batches.
    """

    rows: NDArray[np.int64] | None
    codes: NDArray[np.integer]
    names: Sequence[Any]

    @classmethod
    def of(
        cls, collection: Collection, batch_key: str | None, indices: ArrayLike | None
    ) -> Batches:
        """Return the batches of cells by an obs column; one batch if it is None.

        Raises
        ------
        ColumnError
            obs has no such column, or a cell has no value there.
        """
        strategy = Streaming(indices)
        n_cells = strategy.n_positions(len(collection))
        rows = None if indices is None else np.asarray(strategy.indices)
        if batch_key is None:
            return cls(rows=rows, codes=np.zeros(n_cells, np.uint8), names=[None])
        which = slice(None) if rows is None else rows
        labels = labels_of(collection, batch_key, "batch_key", which, len(collection))
        if None in labels.labels:
            msg = (
                f"{labels.counts[-1]:,} cells have no {batch_key!r} in obs; give the rows of the "
                "others as `indices`"
            )
            raise ColumnError(msg)
        return cls(rows=rows, codes=labels.codes, names=labels.labels)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sums:
    """Sums over cells, in float64.

    Parameters
    ----------
    counts, sums, squares
        For each batch and gene, the number of values other than 0, their sum, and their sum of
        squares, shape (n_batches, n_genes).
    totals, n_genes
        For each cell, the sum of its values, and the number of those other than 0.
    n_negative, n_fractional
        Numbers of values that are negative, and that are no integers.
    """

    counts: NDArray[np.float64]
    sums: NDArray[np.float64]
    squares: NDArray[np.float64]
    totals: NDArray[np.float64]
    n_genes: NDArray[np.int32]
    n_negative: int
    n_fractional: int


def sums_of(
    collection: Collection, batches: Batches, limits: NDArray[np.float64] | None = None
) -> Sums:
    """Return sums over cells, from one pass over them.

    This takes memory for two fetches of 64 MiB, 24 bytes for each gene and batch, and 13 bytes for
    each cell.

    Parameters
    ----------
    collection
        A collection of one element, which has genes.
    batches
        The cells and their batches.
    limits
        Clip values to at most these, shape (n_batches, n_genes).

    Raises
    ------
    FormatError
        A value is NaN or infinite, or a file is damaged.
    ParameterError
        There are so many batches that their sums do not fit into memory.
    """
    (element,) = collection.elements.values()
    n_cells, n_genes, n_batches = batches.codes.size, element.n_columns, len(batches.names)
    n_bytes, available = n_batches * n_genes * _kernels.N_COLUMNS * 8, usable_memory_bytes()
    if n_bytes > available:
        msg = (
            f"the sums of {n_batches:,} batches take {n_bytes / 1e9:,.1f} GB, but "
            f"{available / 1e9:,.1f} GB of memory are available; give a `batch_key` with fewer "
            "values, or fewer `genes`"
        )
        raise ParameterError(msg)
    # Of stored dtypes, those that hold each value exactly.
    dtype = np.promote_types(element.dtype, np.float32)
    dtype = np.dtype(np.float32 if dtype == np.float32 else np.float64)
    at_once = _FETCH_BYTES / max(1.0, collection.mean_row_bytes(dtype))
    at_once = max(at_once, min(_CHUNKS * collection.rows_per_chunk, _CHUNKS * at_once))
    dataset = CellDataset(
        collection,
        Streaming(batches.rows),
        batch_size=min(n_cells, max(1, int(at_once))),
        fetch_factor=1,
        rank=0,
        world_size=1,
        seed=0,
        as_torch=False,
        dtype=dtype,
    )
    sums = np.zeros((n_batches, n_genes, _kernels.N_COLUMNS))
    totals, n_nonzero = np.zeros(n_cells), np.zeros(n_cells, np.int32)
    limits = np.empty((0, 0)) if limits is None else limits
    n_threads, n_done, n_negative, n_fractional = usable_cpu_count(), 0, 0, 0
    bounds = np.linspace(0, n_genes, _TASKS * n_threads + 1).astype(np.int64).tolist()
    with (
        ThreadPoolExecutor(n_threads, thread_name_prefix="cellfeed-sum") as threads,
        ProgressLine() as line,
    ):
        for cells in dataset:
            here = slice(n_done, n_done + len(cells))
            X: Any = cells.X
            if element.layout == "csr":
                values, columns, pointers = X.data, X.indices, X.indptr
            else:
                values, columns = X.reshape(-1), np.tile(np.arange(n_genes), len(cells))
                pointers = np.arange(len(cells) + 1) * n_genes
            columns, pointers = columns.astype(np.int32, copy=False), pointers.astype(np.int64)
            rows = values, columns, pointers, batches.codes[here].astype(np.int64)
            add = partial(_kernels.add_rows, *rows, limits=limits, sums=sums)
            tasks = [threads.submit(add, *each) for each in pairwise(bounds)]
            shape = len(cells), n_genes
            matrix, there = (
                sp.csr_array((each, columns, pointers), shape) for each in (values, values != 0)
            )
            totals[here] = matrix.sum(axis=1, dtype=np.float64)
            n_nonzero[here] = there.sum(axis=1)
            n_negative += int(np.count_nonzero(values < 0))
            n_fractional += int(np.count_nonzero(values != np.floor(values)))
            for task in tasks:
                task.result()
            wrong = np.flatnonzero(~np.isfinite(values))
            if wrong.size:
                row = int(np.searchsorted(pointers, wrong[0], side="right")) - 1
                _refuse_value(collection, cells, row, int(columns[wrong[0]]))
            n_done += len(cells)
            line.show_share("Summing cells", n_done, n_cells)
    return Sums(
        counts=sums[..., _kernels.COUNT],
        sums=sums[..., _kernels.SUM],
        squares=sums[..., _kernels.SQUARES],
        totals=totals,
        n_genes=n_nonzero,
        n_negative=n_negative,
        n_fractional=n_fractional,
    )


def _refuse_value(collection: Collection, cells: Cells, row: int, column: int) -> NoReturn:
    """Raise an error that says where a value is NaN or infinite.

    Raises
    ------
    FormatError
        Always.
    """
    (element,) = collection.elements.values()
    ends = np.cumsum(collection.cells_per_location)
    number = int(cells.rows[row])
    location = collection.locations[int(np.searchsorted(ends, number, side="right"))]
    msg = (
        f"{location}: `{element.name}` is {cells.X[row, column]} in row {number:,} of the "
        f"collection, gene {element.column_names[column]!r}; replace it, or leave the row out of "
        "`indices`"
    )
    raise FormatError(msg)


def require_genes(collection: Collection, element: str | None) -> Collection:
    """Return a collection of one element, of which sums can be taken; of the first if None.

    Raises
    ------
    ParameterError
        It is no such collection, or the element is not there, or has no genes.
    """
    if not isinstance(collection, Collection):
        msg = (  # type: ignore[unreachable]
            f"`collection` must be a Collection, but got a {type(collection).__name__}; open it "
            "with `open_collection`"
        )
        raise ParameterError(msg)
    selected = collection.of_element(element or next(iter(collection.elements)))
    (only,) = selected.elements.values()
    is_matrix = only.layout != "ragged" and len(only.row_shape) == 1 and only.n_columns > 0
    if not is_matrix or only.dtype.kind not in "biuf":
        msg = f"{only.name!r} has no column for each gene; give an `element` that has"
        raise ParameterError(msg)
    return selected


def qc_metrics(
    collection: Collection,
    *,
    element: str | None = None,
    indices: ArrayLike | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return counts for each cell and gene, like `scanpy.pp.calculate_qc_metrics`, in one pass.

    Nothing is loaded as a whole: this takes some 20 bytes for each cell, 24 for each gene, and
    memory for two fetches of 64 MiB. Sums are in float64, which is exact for counts.

    Parameters
    ----------
    collection
        The collection.
    element
        Name of the element, such as ``"layers/counts"``; the first one if None.
    indices
        Rows of the cells, such as those of a training set; all cells if None.

    Returns
    -------
    A table of cells, indexed by their rows in the collection, with the columns
    ``n_genes_by_counts`` and ``total_counts``; and a table of genes, indexed by their names, with
    ``n_cells_by_counts``, ``mean_counts``, ``pct_dropout_by_counts`` and ``total_counts``.

    Raises
    ------
    FormatError
        A value is NaN or infinite, or a file is damaged.
    ParameterError
        The element is missing or has no genes, or rows are not in the collection.

    Examples
    --------
    Size factors are totals divided by their mean.

    >>> import anndata
    >>> from cellfeed import open_collection
    >>> X = np.array([[1, 0, 2], [0, 0, 1]], np.float32)
    >>> obs, var = qc_metrics(open_collection(anndata.AnnData(X)))
    >>> (obs["total_counts"] / obs["total_counts"].mean()).tolist()
    [1.5, 0.5]
    >>> var["n_cells_by_counts"].tolist()
    [1, 0, 2]
    """
    selected = require_genes(collection, element)
    batches = Batches.of(selected, None, indices)
    found = sums_of(selected, batches)
    n_cells, counts, totals = batches.codes.size, found.counts[0], found.sums[0]
    rows = pd.RangeIndex(n_cells) if batches.rows is None else pd.Index(batches.rows)
    of_cells = {"n_genes_by_counts": found.n_genes, "total_counts": found.totals}
    of_genes = {
        "n_cells_by_counts": counts.astype(np.int64),
        "mean_counts": totals / n_cells,
        "pct_dropout_by_counts": 100 * (1 - counts / n_cells),
        "total_counts": totals,
    }
    (only,) = selected.elements.values()
    names = pd.Index(only.column_names)
    return pd.DataFrame(of_cells, index=rows), pd.DataFrame(of_genes, index=names)
