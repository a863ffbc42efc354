"""Some cells of what a loader delivered, to be held against the files afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cellfeed import Minibatch

__all__ = ["DeliveredCell", "sampled_cells"]

# They travel to another process: so many bytes and cells at most, but two cells at least.
_MOST_BYTES, _MOST_CELLS, _LEAST_CELLS = 1 << 20, 64, 2


@dataclass(frozen=True, slots=True, eq=False)
class DeliveredCell:
    """One cell as a minibatch has it.

    Parameters
    ----------
    row
        Its row in the collection, as the minibatch says.
    columns
        Columns of its values; None if ``values`` has one for each gene.
    values
        Its expression.
    n_vars
        Columns of the minibatch.
    labels
        What the minibatch has of each label, a code or a number; those that it lacks are absent.
    """

    row: int
    columns: NDArray[np.integer] | None
    values: NDArray[Any]
    n_vars: int
    labels: Mapping[str, Any]

    @property
    def expression(self) -> NDArray[Any]:
        """The value of each gene, shape (n_vars,)."""
        if self.columns is None:
            return self.values
        dense = np.zeros(self.n_vars, self.values.dtype)
        np.add.at(dense, self.columns, self.values)
        return dense


def sampled_cells(
    minibatch: Minibatch, labels: Sequence[str], *, seed: int
) -> tuple[DeliveredCell, ...]:
    """Return cells of a minibatch in no particular order, the first and the last before others.

    All of them where they are few and small.

    Parameters
    ----------
    minibatch
        What was delivered.
    labels
        The obs columns of interest.
    seed
        Fixes which cells, if not all.
    """
    rows, X = minibatch.rows.numpy(), minibatch.X
    sparse = None
    if X.layout == torch.sparse_csr:
        sparse = tuple(part.numpy() for part in (X.crow_indices(), X.col_indices(), X.values()))
        n_bytes = sum(part.nbytes for part in sparse)
    else:
        n_bytes = X.nbytes
    n_fitting = _MOST_BYTES * len(rows) // max(1, n_bytes)
    n = min(_MOST_CELLS, max(_LEAST_CELLS, n_fitting))
    inner = 1 + np.random.default_rng(seed).permutation(max(0, len(rows) - 2))
    places = dict.fromkeys([0, len(rows) - 1, *inner.tolist()] if len(rows) else [])
    cells = list[DeliveredCell]()
    for place in list(places)[:n]:
        columns = None
        if sparse is None:
            values = X[place].reshape(-1).numpy().copy()
        else:
            indptr, indices, data = sparse
            inside = slice(int(indptr[place]), int(indptr[place + 1]))
            columns, values = indices[inside].copy(), data[inside].copy()
        of_cell = {
            name: minibatch.obs[name][place].item() for name in labels if name in minibatch.obs
        }
        cells.append(DeliveredCell(int(rows[place]), columns, values, X.shape[1:].numel(), of_cell))
    return tuple(cells)
