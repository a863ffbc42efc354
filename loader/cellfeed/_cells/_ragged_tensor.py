"""Rows of different lengths as tensors."""

from __future__ import annotations  # which name what is not there without torch

from dataclasses import dataclass

from cellfeed._torch import torch

__all__ = ["RaggedTensor"]


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
        same_bits = _same_bits(values.dtype)
        out.view(same_bits)[is_there] = values.view(same_bits)
        return out

    def nested(self) -> torch.Tensor:
        """Return the rows as a nested tensor in torch's jagged layout, without a copy."""
        tensor: torch.Tensor = torch.nested.nested_tensor_from_jagged(self.values, self.offsets)
        return tensor


def _same_bits(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same size that torch can index; it cannot index some unsigned ones."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return signed.get(dtype, dtype)
