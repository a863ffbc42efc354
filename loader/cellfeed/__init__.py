"""Feed minibatches from single-cell collections on disk to a training loop.

Open files with `open_collection`, choose a strategy, and iterate over a `CellDataset`.
"""

import importlib
import sys
import typing

if sys.platform == "win32":
    msg = "cellfeed runs on Linux and macOS; on Windows, install it in WSL"
    raise ImportError(msg)

from cellfeed import _lazy
from cellfeed._errors import (
    CellfeedError,
    ColumnError,
    DeliveryError,
    FormatError,
    MismatchError,
    ParameterError,
    PathError,
    RemoteError,
    StateError,
)
from cellfeed._version import __version__

if typing.TYPE_CHECKING:
    from cellfeed._collection import Collection, open_collection
    from cellfeed._collection._perturbation_split import (
        PerturbationSplit,
        perturbation_datasets,
        perturbation_split,
    )
    from cellfeed._collection._splits import Folds, Split, k_folds, random_split
    from cellfeed._convert._load_database import Loaded, load_database
    from cellfeed._convert._preshuffle import Preshuffled, preshuffle
    from cellfeed._dataset import CellDataset, InterleavedDatasets, ReadOptions, Statistics
    from cellfeed._genes import highly_variable_genes, qc_metrics
    from cellfeed._rows import CategoricalColumn, Cells, NumericColumn
    from cellfeed._rows._minibatch import Minibatch, RaggedTensor
    from cellfeed._storages import (
        HuggingFaceSource,
        MemoryMapSource,
        ParquetSource,
        PostgresSource,
        SomaSource,
        Span,
        TenxSource,
        TokenStream,
        TokenStreamWriter,
    )
    from cellfeed._verify import Verified, verify
    from cellfeed.sampling import (
        BlockShuffling,
        BlockWeightedSampling,
        ClassBalancedSampling,
        EpochPlan,
        Fetch,
        GroupedSampling,
        MatchedControls,
        SamplingStrategy,
        Streaming,
    )

__all__ = [
    "BlockShuffling",
    "BlockWeightedSampling",
    "CategoricalColumn",
    "CellDataset",
    "CellfeedError",
    "Cells",
    "ClassBalancedSampling",
    "Collection",
    "ColumnError",
    "DeliveryError",
    "EpochPlan",
    "Fetch",
    "Folds",
    "FormatError",
    "GroupedSampling",
    "HuggingFaceSource",
    "InterleavedDatasets",
    "Loaded",
    "MatchedControls",
    "MemoryMapSource",
    "Minibatch",
    "MismatchError",
    "NumericColumn",
    "ParameterError",
    "ParquetSource",
    "PathError",
    "PerturbationSplit",
    "PostgresSource",
    "Preshuffled",
    "RaggedTensor",
    "ReadOptions",
    "RemoteError",
    "SamplingStrategy",
    "SomaSource",
    "Span",
    "Split",
    "StateError",
    "Statistics",
    "Streaming",
    "TenxSource",
    "TokenStream",
    "TokenStreamWriter",
    "Verified",
    "__version__",
    "highly_variable_genes",
    "k_folds",
    "load_database",
    "open_collection",
    "perturbation_datasets",
    "perturbation_split",
    "preshuffle",
    "qc_metrics",
    "random_split",
    "verify",
]

# What needs other packages is imported when it is asked for, as is said above to type checkers.
_MODULE_OF = {
    "BlockShuffling": "cellfeed.sampling",
    "BlockWeightedSampling": "cellfeed.sampling",
    "CategoricalColumn": "cellfeed._rows",
    "CellDataset": "cellfeed._dataset",
    "Cells": "cellfeed._rows",
    "ClassBalancedSampling": "cellfeed.sampling",
    "Collection": "cellfeed._collection",
    "EpochPlan": "cellfeed.sampling",
    "Fetch": "cellfeed.sampling",
    "Folds": "cellfeed._collection._splits",
    "GroupedSampling": "cellfeed.sampling",
    "HuggingFaceSource": "cellfeed._storages",
    "InterleavedDatasets": "cellfeed._dataset",
    "Loaded": "cellfeed._convert._load_database",
    "MatchedControls": "cellfeed.sampling",
    "MemoryMapSource": "cellfeed._storages",
    "Minibatch": "cellfeed._rows._minibatch",
    "NumericColumn": "cellfeed._rows",
    "ParquetSource": "cellfeed._storages",
    "PerturbationSplit": "cellfeed._collection._perturbation_split",
    "PostgresSource": "cellfeed._storages",
    "Preshuffled": "cellfeed._convert._preshuffle",
    "RaggedTensor": "cellfeed._rows._minibatch",
    "ReadOptions": "cellfeed._dataset",
    "SamplingStrategy": "cellfeed.sampling",
    "SomaSource": "cellfeed._storages",
    "Span": "cellfeed._storages",
    "Statistics": "cellfeed._dataset",
    "Split": "cellfeed._collection._splits",
    "Streaming": "cellfeed.sampling",
    "TenxSource": "cellfeed._storages",
    "TokenStream": "cellfeed._storages",
    "TokenStreamWriter": "cellfeed._storages",
    "Verified": "cellfeed._verify",
    "highly_variable_genes": "cellfeed._genes",
    "k_folds": "cellfeed._collection._splits",
    "load_database": "cellfeed._convert._load_database",
    "open_collection": "cellfeed._collection",
    "perturbation_datasets": "cellfeed._collection._perturbation_split",
    "perturbation_split": "cellfeed._collection._perturbation_split",
    "preshuffle": "cellfeed._convert._preshuffle",
    "qc_metrics": "cellfeed._genes",
    "random_split": "cellfeed._collection._splits",
    "verify": "cellfeed._verify",
}
_MODULES = (
    "console",
    "frameworks",
    "machine",
    "sampling",
    "scdataset",
    "sources",
    "spatial",
    "stages",
    "synthetic",
    "testing",
    "tokenizers",
    "transforms",
)  # there without an import of their own

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        with _lazy.garbage_collection_paused():
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
