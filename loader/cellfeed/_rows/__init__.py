"""How rows lie in memory: groups of rows that leave together, such as minibatches.

A group says how much memory it takes, and makes rows of it. A target says where the rows that a
source reads go: ascending row runs come, with one destination for each of their rows, in the order
of delivery, so that what is read is shuffled by being written, once. It is planned before there is
memory (see `cellfeed._bytes._buffers`), and bound to memory when that is there.
"""

from cellfeed._rows._arrays import (
    CategoricalColumn,
    CsrRows,
    NumericColumn,
    ObsColumn,
    RaggedRows,
    require_int64,
    require_torch_dtype,
    summable,
)
from cellfeed._rows._cells import Cells
from cellfeed._rows._csr import CsrGroup, CsrPieces, CsrTarget, PiecedCsr, csr_groups
from cellfeed._rows._dense import (
    DenseGroup,
    DenseTarget,
    RaggedGroup,
    RaggedTarget,
    dense_groups,
    ragged_groups,
)
from cellfeed._rows._element import (
    ColumnMap,
    ColumnNames,
    Copies,
    CsrChunks,
    DenseChunks,
    Dtypes,
    Element,
    Layout,
    RaggedChunks,
    RaggedRanges,
    RaggedRuns,
    RowPieces,
    column_maps,
    dtypes_of,
)

Group = CsrGroup | DenseGroup | RaggedGroup
"""Rows in memory that are delivered together."""

RowTarget = CsrTarget | DenseTarget | RaggedTarget
