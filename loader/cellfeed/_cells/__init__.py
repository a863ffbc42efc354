"""Cells in NumPy and SciPy, and in PyTorch (`_minibatch`, which imports torch)."""

from cellfeed._cells._cells import Cells
from cellfeed._cells._csr_rows import CsrRows, summable
from cellfeed._cells._limits import require_int64, require_torch_dtype
from cellfeed._cells._obs import CategoricalColumn, NumericColumn, ObsColumn
from cellfeed._cells._ragged_rows import RaggedRows

__all__ = [
    "CategoricalColumn",
    "Cells",
    "CsrRows",
    "NumericColumn",
    "ObsColumn",
    "RaggedRows",
    "require_int64",
    "require_torch_dtype",
    "summable",
]
