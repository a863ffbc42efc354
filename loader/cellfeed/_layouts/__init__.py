"""How rows lie in memory: groups of rows that leave together, such as minibatches.

A group says how much memory it takes, and makes rows of it. A target says where the rows that a
source reads go: ascending row runs come, with one destination for each of their rows, in the order
of delivery, so that what is read is shuffled by being written, once. It is planned before there is
memory (see `cellfeed._buffers`), and bound to memory when that is there.
"""

from cellfeed._layouts._chunked import (
    CsrChunks,
    DenseChunks,
    RaggedChunks,
    RaggedRanges,
    RaggedRuns,
    RowPieces,
)
from cellfeed._layouts._column_maps import ColumnMap, column_maps
from cellfeed._layouts._copies import Copies
from cellfeed._layouts._csr import CsrGroup, CsrTarget, csr_groups
from cellfeed._layouts._dense import DenseGroup, DenseTarget, dense_groups
from cellfeed._layouts._element import ColumnNames, Dtypes, Element, Layout, dtypes_of
from cellfeed._layouts._pieced import CsrPieces, PiecedCsr
from cellfeed._layouts._ragged import RaggedGroup, RaggedTarget, ragged_groups

__all__ = [
    "ColumnMap",
    "ColumnNames",
    "Copies",
    "CsrChunks",
    "CsrGroup",
    "CsrPieces",
    "CsrTarget",
    "DenseChunks",
    "DenseGroup",
    "DenseTarget",
    "Dtypes",
    "Element",
    "Group",
    "Layout",
    "PiecedCsr",
    "RaggedChunks",
    "RaggedGroup",
    "RaggedRanges",
    "RaggedRuns",
    "RaggedTarget",
    "RowPieces",
    "RowTarget",
    "column_maps",
    "csr_groups",
    "dense_groups",
    "dtypes_of",
    "ragged_groups",
]

Group = CsrGroup | DenseGroup | RaggedGroup
"""Rows in memory that are delivered together."""

RowTarget = CsrTarget | DenseTarget | RaggedTarget
