"""Minibatches as messages: large arrays in lent memory, the rest pickled."""

import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import Buffer, Piece
from cellfeed._cells._minibatch import Minibatch, csr_tensor
from cellfeed._torch import HAS_TORCH, torch
from cellfeed._workers._arrivals import arrivals_of
from cellfeed._workers._departures import Departures
from cellfeed._workers._line import Lent

__all__ = ["Message", "message_of"]

_LEAST = 1 << 15  # bytes; smaller arrays are pickled

# The number of the piece in the message and the first byte in it, or the bytes themselves; number
# of bytes; shape and dtype.
_Placed: TypeAlias = tuple[tuple[int, int] | bytearray, int, tuple[int, ...], Any]


class Message:
    """A message that the consumer unpickles as the original minibatch."""

    __slots__ = ("_content", "_key", "_lent")

    def __init__(self, key: int, lent: Sequence[Lent], content: bytes) -> None:
        self._key, self._lent, self._content = key, lent, content

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self._key, self._lent, self._content)


def message_of(minibatch: Any, departures: Departures) -> Message | None:
    """Return a minibatch as a message, and lend the memory that it uses.

    Arrays and tensors in memory of the pool are not copied, unless that memory is lent already;
    others are copied into the pool if they are large.

    Returns
    -------
    None if memory cannot be lent, so the minibatch has to be sent another way.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, departures)
    pickler.dump(minibatch)
    lent = departures.lend(pickler.pieces)
    return None if lent is None else Message(departures.key, lent, file.getvalue())


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, departures: Departures) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._pool = departures.pool
        self._numbers = dict[Piece, int]()
        self._copies = list[Buffer]()  # kept until they are lent

    @property
    def pieces(self) -> list[Piece]:
        """Pieces of memory that the message refers to."""
        return list(self._numbers)

    def persistent_id(self, obj: Any) -> _Placed | None:
        """Place the memory of arrays and tensors."""
        if type(obj) is np.ndarray:
            if obj.dtype.hasobject or not obj.flags.c_contiguous or not obj.nbytes:
                return None
            where = self._where(obj.reshape(-1).view(np.uint8))
            return None if where is None else (where, obj.nbytes, obj.shape, obj.dtype)
        if HAS_TORCH and type(obj) is torch.Tensor and _is_plain(obj):
            content = obj.contiguous().reshape(-1).view(torch.uint8).numpy()
            # Unlike torch, which takes separate shared memory for each tensor.
            placed = self._where(content) or bytearray(content)
            return placed, content.size, tuple(obj.shape), obj.dtype
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Reduce objects that consist of tensors."""
        if type(obj) is Minibatch:
            return Minibatch, (obj.elements, obj.obs, obj.rows)
        if HAS_TORCH and type(obj) is torch.Tensor and obj.layout == torch.sparse_csr:
            if obj.requires_grad:
                return NotImplemented
            parts = obj.crow_indices(), obj.col_indices(), obj.values()
            return csr_tensor, (*parts, tuple(obj.shape))
        return NotImplemented

    def _where(self, content: NDArray[np.uint8]) -> tuple[int, int] | None:
        found = self._pool.find(content.ctypes.data) if content.size else None
        if found is None or found[0].is_lent:
            if content.size < _LEAST:
                return None
            buffer = self._pool.acquire(content.size)
            self._copies.append(buffer)
            copy = buffer.array(content.dtype, content.size)
            copy[...] = content
            return self._where(copy)
        piece, start = found
        return self._numbers.setdefault(piece, len(self._numbers)), start


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[Buffer]) -> None:
        super().__init__(file)
        self._buffers = buffers

    def persistent_load(self, pid: _Placed) -> Any:
        """Return an array or a tensor over lent memory."""
        where, n_bytes, shape, dtype = pid
        if isinstance(where, bytearray):
            return (
                torch.frombuffer(where, dtype=dtype).view(shape) if where else _empty(shape, dtype)
            )
        number, start = where
        content = self._buffers[number].array(np.dtype(np.uint8), n_bytes, start=start)
        if isinstance(dtype, np.dtype):
            return content.view(dtype).reshape(shape)
        return torch.from_numpy(content).view(dtype).view(shape)


def _empty(shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
    return torch.empty(shape, dtype=dtype)


def _opened(key: int, lent: Sequence[Lent], content: bytes) -> Any:
    return _Unpickler(io.BytesIO(content), arrivals_of(key).take(lent)).load()


def _is_plain(tensor: "torch.Tensor") -> bool:
    """Whether a tensor is nothing but its values, in CPU memory."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor.is_nested
    )
