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
    from cellfeed.collection import Collection, open_collection
    from cellfeed.collection._splits import Folds, Split, k_folds, random_split
    from cellfeed.dataset import CellDataset, InterleavedDatasets, ReadOptions, Statistics
    from cellfeed.genes import highly_variable_genes, qc_metrics
    from cellfeed.perturbation import (
        PerturbationSplit,
        perturbation_datasets,
        perturbation_split,
    )
    from cellfeed.preshuffling import Preshuffled, preshuffle
    from cellfeed.rows import CategoricalColumn, Cells, NumericColumn
    from cellfeed.rows._minibatch import Minibatch, RaggedTensor
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
    from cellfeed.storages.huggingface import HuggingFaceSource
    from cellfeed.storages.memory_maps import MemoryMapSource
    from cellfeed.storages.parquet import ParquetSource
    from cellfeed.storages.postgres import PostgresSource
    from cellfeed.storages.postgres._load_database import Loaded, load_database
    from cellfeed.storages.soma import SomaSource
    from cellfeed.storages.tenx import TenxSource
    from cellfeed.storages.tokens import Span, TokenStream, TokenStreamWriter
    from cellfeed.verification import Verified, verify

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

# Lazy, since these need other packages; keep in step with the TYPE_CHECKING block above.
_MODULE_OF = {
    "BlockShuffling": "cellfeed.sampling",
    "BlockWeightedSampling": "cellfeed.sampling",
    "CategoricalColumn": "cellfeed.rows",
    "CellDataset": "cellfeed.dataset",
    "Cells": "cellfeed.rows",
    "ClassBalancedSampling": "cellfeed.sampling",
    "Collection": "cellfeed.collection",
    "EpochPlan": "cellfeed.sampling",
    "Fetch": "cellfeed.sampling",
    "Folds": "cellfeed.collection._splits",
    "GroupedSampling": "cellfeed.sampling",
    "HuggingFaceSource": "cellfeed.storages.huggingface",
    "InterleavedDatasets": "cellfeed.dataset",
    "Loaded": "cellfeed.storages.postgres._load_database",
    "MatchedControls": "cellfeed.sampling",
    "MemoryMapSource": "cellfeed.storages.memory_maps",
    "Minibatch": "cellfeed.rows._minibatch",
    "NumericColumn": "cellfeed.rows",
    "ParquetSource": "cellfeed.storages.parquet",
    "PerturbationSplit": "cellfeed.perturbation",
    "PostgresSource": "cellfeed.storages.postgres",
    "Preshuffled": "cellfeed.preshuffling",
    "RaggedTensor": "cellfeed.rows._minibatch",
    "ReadOptions": "cellfeed.dataset",
    "SamplingStrategy": "cellfeed.sampling",
    "SomaSource": "cellfeed.storages.soma",
    "Span": "cellfeed.storages.tokens",
    "Statistics": "cellfeed.dataset",
    "Split": "cellfeed.collection._splits",
    "Streaming": "cellfeed.sampling",
    "TenxSource": "cellfeed.storages.tenx",
    "TokenStream": "cellfeed.storages.tokens",
    "TokenStreamWriter": "cellfeed.storages.tokens",
    "Verified": "cellfeed.verification",
    "highly_variable_genes": "cellfeed.genes",
    "k_folds": "cellfeed.collection._splits",
    "load_database": "cellfeed.storages.postgres._load_database",
    "open_collection": "cellfeed.collection",
    "perturbation_datasets": "cellfeed.perturbation",
    "perturbation_split": "cellfeed.perturbation",
    "preshuffle": "cellfeed.preshuffling",
    "qc_metrics": "cellfeed.genes",
    "random_split": "cellfeed.collection._splits",
    "verify": "cellfeed.verification",
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
