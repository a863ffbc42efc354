"""Minibatches: cells as torch tensors."""

from __future__ import annotations  # which name what is not there without torch

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells._cells import Cells, CsrRows
from cellfeed._cells._limits import require_int64, require_torch_dtype
from cellfeed._torch import require_torch, torch

__all__ = ["Minibatch", "minibatch_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The cells of one training step, as torch tensors.

    Parameters
    ----------
    X
        Expression, shape (n_cells, n_vars): sparse CSR with int32 indices where it is stored
        sparse, dense where it is stored dense or dense was asked for. torch itself can make no
        dense tensor of unsigned 16 to 64 bit sparse ones; ask for dense there.
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

    def to(
        self, device: torch.device | str, *, dense: bool = False, non_blocking: bool = False
    ) -> Minibatch:
        """Return the same cells on a device.

        Parameters
        ----------
        device
            Where to.
        dense
            Whether ``X`` is made dense, which happens there: what travels is sparse.
        non_blocking
            Whether to return before the copies are done, which takes pinned memory; see
            ``loader(pin_memory=True)``.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if dense and moved.X.layout == torch.sparse_csr:
            return Minibatch(moved.X.to_dense(), moved.obs, moved.rows)
        return moved

    def pin_memory(self) -> Minibatch:
        """Return the same cells in pinned memory; a DataLoader with ``pin_memory`` calls this."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Minibatch:
        """Apply a function to each plain tensor, also to those that sparse ``X`` consists of."""
        if self.X.layout == torch.sparse_csr:
            parts = (self.X.crow_indices(), self.X.col_indices(), self.X.values())
            crow, col, values = map(function, parts)
            matrix = _csr_tensor(crow, col, values, self.X.shape)
        else:
            matrix = function(self.X)
        obs = {name: function(tensor) for name, tensor in self.obs.items()}
        return Minibatch(matrix, obs, function(self.rows))

    def __reduce__(self) -> tuple[Any, ...]:
        # From a worker process, each tensor would travel in shared memory of its own, which
        # takes a file descriptor and several system calls; packed, a minibatch takes one.
        if self.X.layout == torch.sparse_csr:
            matrix: tuple[torch.Tensor, ...] = (
                self.X.crow_indices(),
                self.X.col_indices(),
                self.X.values(),
            )
        else:
            matrix = (self.X,)
        tensors = (*matrix, self.rows, *self.obs.values())
        if any(each.layout != torch.strided or each.device.type != "cpu" for each in tensors):
            return Minibatch, (self.X, self.obs, self.rows)
        packed, places = _pack(tensors)
        return _unpack_minibatch, (packed, places, self.X.shape, len(matrix), tuple(self.obs))


def minibatch_of(cells: Cells, *, dense: bool) -> Minibatch:
    """Return cells as tensors; see `Cells.to_torch`."""
    require_torch("`to_torch`")
    require_torch_dtype((cells.X.data if isinstance(cells.X, CsrRows) else cells.X).dtype)
    if isinstance(cells.X, np.ndarray):
        matrix = torch.from_numpy(cells.X)
    elif dense:
        matrix = torch.from_numpy(cells.to_scipy().X.toarray())
    else:
        csr = cells.X if isinstance(cells.X, CsrRows) else cells.X.tocsr()
        crow, col, values = map(torch.from_numpy, (csr.indptr, csr.indices, csr.data))
        matrix = _csr_tensor(crow, col, values, csr.shape)
    obs = {name: _obs_tensor(name, values) for name, values in cells.obs.items()}
    return Minibatch(matrix, obs, torch.from_numpy(cells.rows))


def _obs_tensor(name: str, values: NDArray[Any]) -> torch.Tensor:
    require_int64(f"obs column {name!r}", values)
    # torch indexes and counts classes with int64, in losses above all.
    return torch.from_numpy(values.astype(np.int64) if values.dtype.kind in "iu" else values)


_Place: TypeAlias = "tuple[int, int, torch.dtype, torch.Size]"
_ALIGNMENT = 16


def _pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[_Place, ...]]:
    """Copy tensors into one of bytes; also return where each of them lies."""
    places = list[_Place]()
    end = 0
    for tensor in tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.numel() * tensor.element_size()
        places.append((start, end, tensor.dtype, tensor.shape))
    packed = torch.empty(end, dtype=torch.uint8)
    for tensor, (start, stop, dtype, size) in zip(tensors, places, strict=True):
        packed[start:stop].view(dtype).view(size).copy_(tensor)
    return packed, tuple(places)


def _unpack_minibatch(
    packed: torch.Tensor,
    places: Sequence[_Place],
    shape: tuple[int, int],
    n_parts_of_matrix: int,
    obs_names: Sequence[str],
) -> Minibatch:
    tensors = [packed[start:stop].view(dtype).view(size) for start, stop, dtype, size in places]
    # Clones, so that who keeps the labels of an epoch does not keep its expression alive.
    rows, *obs = [tensor.clone() for tensor in tensors[n_parts_of_matrix:]]
    matrix = tensors[0]
    if n_parts_of_matrix > 1:
        crow_indices, col_indices, values = tensors[:n_parts_of_matrix]
        matrix = _csr_tensor(crow_indices, col_indices, values, shape)
    return Minibatch(matrix, dict(zip(obs_names, obs, strict=True)), rows)


def _csr_tensor(
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    values: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            crow_indices, col_indices, values, size=tuple(shape), check_invariants=False
        )
