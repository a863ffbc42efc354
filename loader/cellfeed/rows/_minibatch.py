"""Minibatches: cells as torch tensors."""

from __future__ import annotations  # which name what is not there without torch

import ctypes
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed._torch import HAS_TORCH, require_torch, torch
from cellfeed.rows._layout import (
    ByElement,
    CsrRows,
    RaggedRows,
    refuse_element,
    require_int64,
    require_torch_dtype,
)

_MANY_BYTES = 8 * 2**20  # of a tensor that several threads copy into pinned memory
_COPYING_THREADS = 4

# Rows of different lengths as tensors.


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTensor:
    """Rows of different lengths: their concatenated values, and the offset of each row.

    Parameters
    ----------
    offsets
        Start of each row in ``values``, and the end of the last; ascending from 0, int64, shape
        (n_rows + 1,).
    values
        Values of all rows, shape (n_values,).
    """

    offsets: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def shape(self) -> torch.Size:
        """Number of rows."""
        return torch.Size([len(self)])

    @property
    def lengths(self) -> torch.Tensor:
        """Number of values of each row, int64, shape (n_rows,)."""
        return self.offsets.diff()

    def row(self, k: int) -> torch.Tensor:
        """Return the values of one row."""
        return self.values[int(self.offsets[k]) : int(self.offsets[k + 1])]

    def padded(self, fill: float = 0) -> torch.Tensor:
        """Return the rows as a tensor as wide as the longest, shape (n_rows, longest).

        Parameters
        ----------
        fill
            Value of the padding after the end of a row.
        """
        lengths, values = self.lengths, self.values
        width = int(lengths.max()) if len(self) else 0
        shape = (len(self), width, *values.shape[1:])
        out = torch.full(shape, fill, dtype=values.dtype, device=values.device)
        is_there = torch.arange(width, device=values.device) < lengths[:, None]
        bits = same_bits(values.dtype)
        out.view(bits)[is_there] = values.view(bits)
        return out

    def nested(self) -> torch.Tensor:
        """Return the rows as a nested tensor in torch's jagged layout, without a copy."""
        tensor: torch.Tensor = torch.nested.nested_tensor_from_jagged(self.values, self.offsets)
        return tensor


def same_bits(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same size that torch can index; it cannot index some unsigned ones."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return signed.get(dtype, dtype)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Minibatch(ByElement):
    """The cells of one training step, as torch tensors.

    ``minibatch["layers/counts"]`` is an element, ``minibatch.X`` is the first element, and
    ``minibatch.keys()`` are the names of elements.

    Parameters
    ----------
    elements
        Tensors by name, such as ``"X"``, in the order of the collection. Each has shape
        (n_cells, n_columns), or more dimensions if it is stored with more, such as images. An
        element is sparse CSR with int32 indices if it is stored sparse; dense if
        it is stored dense or with ``dense=True``; and a `RaggedTensor` if rows differ in length.
        torch has no structured dtypes, so each field becomes an element of its own:
        ``"X/token"``. torch cannot convert sparse tensors of unsigned 16 to 64 bit integers to
        dense ones; use ``dense=True`` for these.
    obs
        One tensor for each obs column of the collection, shape (n_cells,): int64 codes (-1
        where missing) of a categorical column, numbers of a numeric one.
    rows
        Row of each cell in the collection, int64, shape (n_cells,).
    obs_names
        Name of each cell in its source, a NumPy array of str, shape (n_cells,); None unless the
        collection was opened with ``obs_names=True``.
    controls
        The controls of these cells, k for each: rows ``i * k`` to ``i * k + k - 1`` belong to cell
        i. None unless the strategy is `MatchedControls`.
    neighbors
        The neighbours of these cells, in the same way; None unless the strategy is
        `cellfeed.spatial.WithNeighbors`.
    """

    elements: Mapping[str, Any]
    obs: Mapping[str, torch.Tensor]
    rows: torch.Tensor
    obs_names: NDArray[Any] | None = None
    controls: Minibatch | None = None
    neighbors: Minibatch | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Any:
        return self.elements[name] if name in self else refuse_element(name, self.keys())

    def to(
        self, device: torch.device | str, *, dense: bool = False, non_blocking: bool = False
    ) -> Minibatch:
        """Return the same cells on a device.

        Parameters
        ----------
        device
            The target device.
        dense
            Whether to make sparse elements dense. This happens on the device, after the sparse
            elements have been copied.
        non_blocking
            Whether to return before the copies are done. This requires pinned memory; see
            ``loader(pin_memory=True)``.
        """
        moved = _mapped(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return _made_dense(moved) if dense else moved

    def pin_memory(self) -> Minibatch:
        """Return the same cells in pinned memory; a DataLoader with ``pin_memory`` calls this."""
        return _mapped(self, _pinned)

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes, since torch does not unpickle some unsigned dtypes, and warns of sparse tensors.
        elements = {
            name: ([_bytes_of(part) for part in _parts(each)], tuple(each.shape))
            for name, each in self.items()
        }
        obs = {name: _bytes_of(each) for name, each in self.obs.items()}
        others = self.obs_names, self.controls, self.neighbors
        return _from_bytes, (elements, obs, _bytes_of(self.rows), *others)


_Bytes: TypeAlias = "tuple[torch.Tensor, torch.dtype, torch.Size]"


def _bytes_of(tensor: torch.Tensor) -> _Bytes:
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,):  # also of one element, which torch calls contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8), tensor.dtype, tensor.shape


def _tensor_of(content: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return content.view(dtype).view(shape)


def _from_bytes(
    elements: Mapping[str, tuple[Sequence[_Bytes], Sequence[int]]],
    obs: Mapping[str, _Bytes],
    rows: _Bytes,
    *others: Any,
) -> Minibatch:
    joined = {
        name: _joined([_tensor_of(*part) for part in parts], shape)
        for name, (parts, shape) in elements.items()
    }
    values = {name: _tensor_of(*each) for name, each in obs.items()}
    return Minibatch(joined, values, _tensor_of(*rows), *others)


def _mapped(minibatch: Minibatch, function: Callable[[torch.Tensor], torch.Tensor]) -> Minibatch:
    """Apply a function to each strided tensor, including the parts of sparse tensors."""
    elements = {
        name: _joined([function(part) for part in _parts(each)], each.shape)
        for name, each in minibatch.items()
    }
    obs = {name: function(tensor) for name, tensor in minibatch.obs.items()}
    companions = {name: _mapped(each, function) for name, each in minibatch.companions.items()}
    return Minibatch(elements, obs, function(minibatch.rows), minibatch.obs_names, **companions)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in pinned memory, copied by one thread, or a few if they are many.

    torch would divide each copy among as many threads as there are processors, which wait for each
    other where all processors decode.
    """
    if tensor.is_pinned() or tensor.device.type != "cpu":
        return tensor
    given = tensor.contiguous()
    pinned = torch.empty_like(given, pin_memory=True)
    _copy(given.data_ptr(), pinned.data_ptr(), given.nbytes)
    return pinned


def _copy(source: int, target: int, n_bytes: int) -> None:
    """Copy bytes from one address to another."""
    if n_bytes < _MANY_BYTES:
        ctypes.memmove(target, source, n_bytes)
        return
    size = -(-n_bytes // _COPYING_THREADS)

    def copy_part(start: int) -> None:
        ctypes.memmove(target + start, source + start, min(size, n_bytes - start))

    with ThreadPoolExecutor(_COPYING_THREADS) as threads:
        list(threads.map(copy_part, range(0, n_bytes, size)))


def _made_dense(minibatch: Minibatch) -> Minibatch:
    elements = {
        name: each.to_dense() if _is_sparse(each) else each for name, each in minibatch.items()
    }
    companions: dict[str, Any] = {
        name: _made_dense(each) for name, each in minibatch.companions.items()
    }
    return replace(minibatch, elements=elements, **companions)


def minibatch_of(cells: ByElement, *, dense: bool) -> Minibatch:
    """Return `Cells` as tensors, with their companions."""
    require_torch("`to_torch`")
    elements = {
        own_name: _element_tensor(own, dense=dense)
        for name, each in cells.items()
        for own_name, own in _fields(name, each)
    }
    obs = {name: _obs_tensor(name, values) for name, values in cells.obs.items()}
    companions = {name: minibatch_of(each, dense=dense) for name, each in cells.companions.items()}
    return Minibatch(elements, obs, torch.from_numpy(cells.rows), cells.obs_names, **companions)


def _fields(name: str, rows: Any) -> Iterator[tuple[str, Any]]:
    """Yield rows of structured values as rows of each field, since torch has no such dtypes."""
    if isinstance(rows, CsrRows):
        yield name, rows
    elif isinstance(rows, RaggedRows) and rows.dtype.names is not None:
        for field in rows.dtype.names:
            values = rows.values[field].copy()  # one value would keep its stride
            yield f"{name}/{field}", RaggedRows(rows.offsets, values)
    elif isinstance(rows, np.ndarray) and rows.dtype.names is not None:
        for field in rows.dtype.names:
            yield f"{name}/{field}", rows[field].copy()
    else:
        yield name, rows


def _element_tensor(rows: Any, *, dense: bool) -> Any:
    require_torch_dtype((rows.data if isinstance(rows, CsrRows) else rows).dtype)
    if isinstance(rows, RaggedRows):
        return RaggedTensor(torch.from_numpy(rows.offsets), torch.from_numpy(rows.values))
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(rows)
    if dense:
        scipy = rows.to_scipy() if isinstance(rows, CsrRows) else rows
        return torch.from_numpy(scipy.toarray())
    csr = rows if isinstance(rows, CsrRows) else rows.tocsr()
    crow, col, values = map(torch.from_numpy, (csr.indptr, csr.indices, csr.data))
    return csr_tensor(crow, col, values, csr.shape)


def _is_sparse(element: Any) -> bool:
    return not isinstance(element, RaggedTensor) and element.layout == torch.sparse_csr


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Return the strided tensors of an element: three for CSR, two for ragged rows."""
    if isinstance(tensor, RaggedTensor):
        return [tensor.offsets, tensor.values]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor]


def _joined(parts: Sequence[torch.Tensor], shape: Sequence[int]) -> Any:
    """Return the element with these `_parts`."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == len(dataclasses.fields(RaggedTensor)):
        return RaggedTensor(*parts)
    crow_indices, col_indices, values = parts
    return csr_tensor(crow_indices, col_indices, values, shape)


def _obs_tensor(name: str, values: NDArray[Any]) -> torch.Tensor:
    require_int64(f"obs column {name!r}", values)
    # torch indexes and counts classes with int64, in losses above all.
    return torch.from_numpy(values.astype(np.int64) if values.dtype.kind in "iu" else values)


def csr_tensor(
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    values: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    """Return a sparse CSR tensor over the memory of its parts."""
    _silence_first_warning()
    return torch.sparse_csr_tensor(
        crow_indices, col_indices, values, size=tuple(shape), check_invariants=False
    )


@cache
def _silence_first_warning() -> None:
    """Make a sparse CSR tensor, since torch warns on the first, whatever it is told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        nothing = torch.zeros(1, dtype=torch.int32)
        torch.sparse_csr_tensor(
            nothing, nothing[:0], nothing[:0], size=(0, 0), check_invariants=False
        )


def _refuse_collating(batch: Sequence[Any], **_: Any) -> Any:
    """Raise an error where torch would make one batch of several minibatches."""
    msg = (
        f"this DataLoader would batch minibatches again, {len(batch)} at a time; write "
        "`dataset.loader()` of cellfeed, or DataLoader(dataset, batch_size=None)"
    )
    raise ParameterError(msg)


def refuse_collating(*types: type) -> None:
    """Let torch refuse to make one batch of several minibatches of some types."""
    if HAS_TORCH:
        from torch.utils.data._utils.collate import default_collate_fn_map  # noqa: PLC0415

        default_collate_fn_map.update(dict.fromkeys(types, _refuse_collating))


refuse_collating(Minibatch)
