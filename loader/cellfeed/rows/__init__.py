"""How rows lie in memory: groups of rows that are delivered together, such as minibatches.

A group says how much memory it takes, and makes rows of it. A target says where the rows that a
source reads go: rows are read in ascending order, with one destination for each, in the order of
delivery, so that they are shuffled by being written, once. It is planned before memory is allocated
(see `cellfeed.bytes._buffers`), and bound to memory afterwards.
"""

from cellfeed.rows._element import (
    CategoricalColumn,
    Cells,
    Chunks,
    ColumnMap,
    ColumnNames,
    CsrChunks,
    DenseChunks,
    Dtypes,
    Element,
    NumericColumn,
    ObsColumn,
    RaggedChunks,
    SparseChunks,
    column_maps,
    dtypes_of,
)
from cellfeed.rows._layout import (
    Copies,
    CsrRows,
    FoundRows,
    Group,
    Layout,
    RaggedRows,
    RowTarget,
    lay_out,
    require_int64,
    require_torch_dtype,
    summable,
)

__all__ = [
    "CategoricalColumn",
    "Cells",
    "Chunks",
    "ColumnMap",
    "ColumnNames",
    "Copies",
    "CsrChunks",
    "CsrRows",
    "DenseChunks",
    "Dtypes",
    "Element",
    "FoundRows",
    "Group",
    "Layout",
    "NumericColumn",
    "ObsColumn",
    "RaggedChunks",
    "RaggedRows",
    "RowTarget",
    "SparseChunks",
    "column_maps",
    "dtypes_of",
    "lay_out",
    "require_int64",
    "require_torch_dtype",
    "summable",
]
