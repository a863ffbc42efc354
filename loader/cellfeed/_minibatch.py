"""What comes out of a collection: cells in NumPy, and minibatches in torch."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Cells", "Minibatch"]


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The cells of one training step, as torch tensors.

    Parameters
    ----------
    X
        Expression, shape (n_cells, n_vars): sparse CSR with int32 indices where it is stored
        sparse, dense where it is stored dense or dense was asked for.
    obs
        One tensor for each obs column of the collection, shape (n_cells,): int64 codes (-1
        where missing) of a categorical column, numbers of a numeric one.
    rows
        Row of each cell in the collection, int64, shape (n_cells,).
    """

    X: torch.Tensor
    obs: Mapping[str, torch.Tensor]
    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch warns of unchecked invariants when it rebuilds a sparse tensor from a worker;
        # its parts travel without.
        if self.X.layout != torch.sparse_csr:
            return Minibatch, (self.X, self.obs, self.rows)
        parts = (self.X.crow_indices(), self.X.col_indices(), self.X.values())
        return _rebuild_sparse, (*parts, self.X.shape, self.obs, self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Some cells of a collection, in NumPy: what ``fetch_transform`` gets and may replace.

    ``cells[indices]`` selects cells from all parts at once.

    Parameters
    ----------
    X
        Expression, shape (n_cells, n_vars): a SciPy CSR array or a NumPy array.
    obs
        One array for each obs column of the collection, shape (n_cells,): codes (-1 where
        missing) of a categorical column, numbers of a numeric one.
    rows
        Row of each cell in the collection, int64, shape (n_cells,).
    """

    X: Any
    obs: Mapping[str, NDArray[Any]]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: NDArray[np.intp]) -> "Cells":
        obs = {name: values[indices] for name, values in self.obs.items()}
        return Cells(self.X[indices], obs, self.rows[indices])

    def to_torch(self, *, dense: bool = False) -> Minibatch:
        """Return the same cells as tensors.

        Parameters
        ----------
        dense
            Whether ``X`` is made dense if it is sparse.
        """
        if isinstance(self.X, np.ndarray):
            matrix = torch.from_numpy(self.X)
        elif dense:
            matrix = torch.from_numpy(self.X.toarray())
        else:
            csr = self.X.tocsr()
            crow, col, values = map(torch.from_numpy, (csr.indptr, csr.indices, csr.data))
            matrix = _csr_tensor(crow, col, values, csr.shape)
        obs = {name: _obs_tensor(values) for name, values in self.obs.items()}
        return Minibatch(matrix, obs, torch.from_numpy(self.rows))


def _obs_tensor(values: NDArray[Any]) -> torch.Tensor:
    # torch indexes and counts classes with int64, in losses above all.
    return torch.from_numpy(values.astype(np.int64) if values.dtype.kind in "iu" else values)


def _rebuild_sparse(
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, int],
    obs: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
) -> Minibatch:
    return Minibatch(_csr_tensor(crow_indices, col_indices, values, shape), obs, rows)


def _csr_tensor(
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, int],
) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            crow_indices, col_indices, values, size=shape, check_invariants=False
        )
