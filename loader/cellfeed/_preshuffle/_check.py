"""Checking the result: every cell once, the numbers of elements, and a sample of values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, sparse_dataset
from numpy.typing import NDArray

from cellfeed._chunks import expect_numcodecs
from cellfeed._errors import FormatError
from cellfeed._preshuffle._folder import OutputFolder
from cellfeed._preshuffle._job import Job
from cellfeed._preshuffle._part import Inputs
from cellfeed._runs import merge_consecutive

__all__ = ["check_store"]

_SAMPLED_CELLS = 128


def check_store(
    folder: OutputFolder, job: Job, inputs: Inputs, on_part: Callable[[int], object]
) -> None:
    """Check the written store against the inputs, reading only part of it.

    For every part, the provenance of each cell and the row pointers are checked; for a sample of
    cells, everything.

    Parameters
    ----------
    folder, job, inputs
        The output, and the job and inputs that it must match.
    on_part
        Called with the number of parts that have been checked.

    Raises
    ------
    FormatError
        A part is damaged; the message names it, and the remedy.
    """
    expect_numcodecs()
    seen = np.zeros(job.n_cells, dtype=bool)
    sampled = -(-_SAMPLED_CELLS // job.n_parts)
    rng = np.random.default_rng(0)
    for number in range(job.n_parts):
        path = folder.part(number)
        try:
            group = zarr.open_group(path, mode="r")
            rows = _rows(group, inputs)
            expected = job.part(number)
            _require(path, np.array_equal(rows, expected.rows[expected.order]), "other cells")
            seen[rows] = True
            merged = _check_matrix(path, group, job, rows, inputs)
            chosen = rng.choice(rows.size, min(sampled, rows.size), replace=False)
            chosen = np.union1d(chosen, merged[:_SAMPLED_CELLS])
            _check_cells(path, group, inputs, rows, chosen)
        except FormatError:
            raise
        except Exception as error:  # zarr and its codecs have no common base of what they raise
            raise _damaged(path, f"it cannot be read ({error})") from error
        on_part(number + 1)
    if not seen.all():  # parts do not overlap, nor leave out any: a mistake in the plan
        msg = (
            f"{folder.path}: {job.n_cells - int(seen.sum())} cells are missing; remove it, "
            "and report this as a bug of cellfeed"
        )
        raise FormatError(msg)


def _rows(group: Any, inputs: Inputs) -> NDArray[np.int64]:
    """Return the input row of each cell of a part, from its provenance."""
    source_file, source_row = inputs.obs.provenance
    codes = group["obs"][source_file]["codes"][:].astype(np.int64)
    rows: NDArray[np.int64] = inputs.obs.starts[codes] + group["obs"][source_row][:]
    return rows


def _check_matrix(
    path: Path, group: Any, job: Job, rows: NDArray[np.int64], inputs: Inputs
) -> NDArray[np.intp]:
    """Check the shape, and the number of elements of each cell.

    Returns
    -------
    Cells of the part with fewer elements than in the file, which is correct only if the file has
    duplicates, since reading sums them.
    """
    X = group["X"]
    if job.n_elements is None:
        _require(path, X.shape == (rows.size, job.n_vars), f"it has shape {X.shape}")
        return np.empty(0, dtype=np.intp)
    lengths = np.diff(X["indptr"][:].astype(np.int64))
    _require(
        path, lengths.size == rows.size, f"it has {lengths.size} rows, but {rows.size} expected"
    )
    complete = X["data"].shape == X["indices"].shape == (lengths.sum(),)
    _require(path, complete, "its numbers of elements do not match its row pointers")
    stored = _stored_lengths(rows, job, inputs)
    _require(path, bool(np.all(lengths <= stored)), "it has more elements than the input")
    return np.flatnonzero(lengths < stored)


def _stored_lengths(rows: NDArray[np.int64], job: Job, inputs: Inputs) -> NDArray[np.int64]:
    order = np.argsort(rows)
    lengths = np.empty(rows.size, dtype=np.int64)
    lengths[order] = inputs.collection.row_lengths(job.element, merge_consecutive(rows[order]))
    return lengths


def _check_cells(
    path: Path,
    group: Any,
    inputs: Inputs,
    rows: NDArray[np.int64],
    chosen: NDArray[np.intp],
) -> None:
    """Compare the given cells with the input, value by value."""
    order = np.argsort(rows[chosen])
    wanted, places = rows[chosen][order], chosen[order]
    written = group["X"] if hasattr(group["X"], "dtype") else sparse_dataset(group["X"])
    found = _dense(written[chosen])[order]
    _require(path, np.array_equal(found, _dense(inputs.collection[wanted].X), equal_nan=True),
             "its values differ from the input")  # fmt: skip
    obs: pd.DataFrame = read_elem(group["obs"])
    same = obs.iloc[places].astype(object).equals(inputs.obs.read(wanted).astype(object))
    _require(path, same, "its obs differs from the input")


def _dense(matrix: Any) -> NDArray[Any]:
    dense: NDArray[Any] = matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
    return dense


def _require(path: Path, holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as "require"
    if not holds:
        raise _damaged(path, f"it has {otherwise}")


def _damaged(path: Path, what: str) -> FormatError:
    msg = f"{path}: {what}; remove this folder and run the same command again"
    return FormatError(msg)
