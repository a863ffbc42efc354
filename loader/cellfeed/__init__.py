"""Feed minibatches from single-cell collections on disk to a training loop.

Open files with `open_collection`, choose a strategy, and iterate over a `CellDataset`.
"""

import sys

if sys.platform == "win32":
    msg = "cellfeed runs on Linux and macOS; on Windows, install it in WSL"
    raise ImportError(msg)

from cellfeed._cells import CategoricalColumn, Cells, Minibatch, NumericColumn
from cellfeed._collection import Collection, open_collection
from cellfeed._dataset import CellDataset
from cellfeed._errors import (
    CellfeedError,
    ColumnError,
    DeliveryError,
    FormatError,
    MismatchError,
    ParameterError,
    PathError,
)
from cellfeed._indexables import HuggingFaceCells, MemoryMappedCells, MultiIndexable
from cellfeed._preshuffle import Preshuffled, preshuffle
from cellfeed._version import __version__
from cellfeed.sampling import BlockShuffling, EpochPlan, Fetch, SamplingStrategy, Streaming

__all__ = [
    "BlockShuffling",
    "CategoricalColumn",
    "CellDataset",
    "CellfeedError",
    "Cells",
    "Collection",
    "ColumnError",
    "DeliveryError",
    "EpochPlan",
    "Fetch",
    "FormatError",
    "HuggingFaceCells",
    "MemoryMappedCells",
    "Minibatch",
    "MismatchError",
    "MultiIndexable",
    "NumericColumn",
    "ParameterError",
    "PathError",
    "Preshuffled",
    "SamplingStrategy",
    "Streaming",
    "__version__",
    "open_collection",
    "preshuffle",
]
