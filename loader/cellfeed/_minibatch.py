"""What comes out of a collection: cells in NumPy, and minibatches in torch."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from cellfeed._chunks import densify
from cellfeed._errors import ParameterError
from cellfeed._obs import require_int64

__all__ = ["Cells", "CsrRows", "Minibatch", "require_torch_dtype", "summable"]


def summable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that sparse values have in SciPy, which knows no float16."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def require_torch_dtype(dtype: np.dtype[Any]) -> None:
    """Check that torch has a dtype of numbers, which it has up to 64 bits.

    Raises
    ------
    ParameterError
        It has not.
    """
    if dtype.itemsize > np.dtype(np.float64).itemsize and dtype.kind == "f":
        msg = f"values are stored as {dtype}, which torch does not have; give `dtype='float64'`"
        raise ParameterError(msg)


@dataclass(frozen=True, slots=True, eq=False)
class CsrRows:
    """Sparse rows, before they become SciPy's or torch's.

    Parameters
    ----------
    indptr, indices
        Row pointer, shape (n_rows + 1,), and columns, ascending in each row; int32 or int64.
    data
        Values, shape (n_elements,).
    n_vars
        Number of columns.
    """

    indptr: NDArray[Any]
    indices: NDArray[Any]
    data: NDArray[Any]
    n_vars: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.indptr) - 1, self.n_vars

    def to_scipy(self) -> sp.csr_array:
        """Return the rows as a SciPy array over the same memory; float16 becomes float32."""
        data = self.data.astype(summable(self.data.dtype), copy=False)
        return sp.csr_array((data, self.indices, self.indptr), shape=self.shape)

    def densify_into(self, dense: NDArray[Any]) -> None:
        """Fill ``dense``, of this shape and dtype."""
        bits = np.dtype(f"u{self.data.itemsize}")
        densify(self.indptr, self.indices, self.data.view(bits), dense.view(bits))


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
    ) -> "Minibatch":
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

    def pin_memory(self) -> "Minibatch":
        """Return the same cells in pinned memory; a DataLoader with ``pin_memory`` calls this."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Minibatch":
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

    def to_scipy(self) -> "Cells":
        """Return the same cells with ``X`` as SciPy or NumPy has it."""
        X = self.X.to_scipy() if isinstance(self.X, CsrRows) else self.X
        return Cells(X, self.obs, self.rows)

    def to_torch(self, *, dense: bool = False) -> Minibatch:
        """Return the same cells as tensors, over the same memory where possible.

        Parameters
        ----------
        dense
            Whether ``X`` is made dense if it is sparse.

        Raises
        ------
        ParameterError
            ``X`` has a dtype that torch has not, which is longdouble.
        ColumnError
            An obs column has numbers above the largest int64.
        """
        require_torch_dtype((self.X.data if isinstance(self.X, CsrRows) else self.X).dtype)
        if isinstance(self.X, np.ndarray):
            matrix = torch.from_numpy(self.X)
        elif dense:
            matrix = torch.from_numpy(self.to_scipy().X.toarray())
        else:
            csr = self.X if isinstance(self.X, CsrRows) else self.X.tocsr()
            crow, col, values = map(torch.from_numpy, (csr.indptr, csr.indices, csr.data))
            matrix = _csr_tensor(crow, col, values, csr.shape)
        obs = {name: _obs_tensor(name, values) for name, values in self.obs.items()}
        return Minibatch(matrix, obs, torch.from_numpy(self.rows))


def _obs_tensor(name: str, values: NDArray[Any]) -> torch.Tensor:
    require_int64(f"obs column {name!r}", values)
    # torch indexes and counts classes with int64, in losses above all.
    return torch.from_numpy(values.astype(np.int64) if values.dtype.kind in "iu" else values)


_Place = tuple[int, int, torch.dtype, torch.Size]
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
