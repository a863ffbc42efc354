"""Feed minibatches from single-cell collections on disk to a training loop.

Open files with `open_collection`, choose a strategy, and iterate over a `CellDataset`.
"""

import importlib
import pkgutil
import sys
import typing

if sys.platform == "win32":
    msg = "cellfeed runs on Linux and macOS; on Windows, install it in WSL"
    raise ImportError(msg)

from cellfeed import _lazy

if typing.TYPE_CHECKING:
    from cellfeed._errors import CellfeedError as CellfeedError
    from cellfeed._errors import ColumnError as ColumnError
    from cellfeed._errors import DeliveryError as DeliveryError
    from cellfeed._errors import FormatError as FormatError
    from cellfeed._errors import MismatchError as MismatchError
    from cellfeed._errors import ParameterError as ParameterError
    from cellfeed._errors import PathError as PathError
    from cellfeed._errors import RemoteError as RemoteError
    from cellfeed._errors import StateError as StateError
    from cellfeed._version import __version__ as __version__
    from cellfeed.collection import Collection as Collection
    from cellfeed.collection import open_collection as open_collection
    from cellfeed.dataset import CellDataset as CellDataset
    from cellfeed.dataset import InterleavedDatasets as InterleavedDatasets
    from cellfeed.dataset import ReadOptions as ReadOptions
    from cellfeed.dataset import Statistics as Statistics
    from cellfeed.genes import highly_variable_genes as highly_variable_genes
    from cellfeed.genes import qc_metrics as qc_metrics
    from cellfeed.perturbation import MatchedControls as MatchedControls
    from cellfeed.perturbation import PerturbationSplit as PerturbationSplit
    from cellfeed.perturbation import perturbation_datasets as perturbation_datasets
    from cellfeed.perturbation import perturbation_split as perturbation_split
    from cellfeed.preshuffling import Preshuffled as Preshuffled
    from cellfeed.preshuffling import preshuffle as preshuffle
    from cellfeed.rows import CategoricalColumn as CategoricalColumn
    from cellfeed.rows import Cells as Cells
    from cellfeed.rows import NumericColumn as NumericColumn
    from cellfeed.rows._minibatch import Minibatch as Minibatch
    from cellfeed.rows._minibatch import RaggedTensor as RaggedTensor
    from cellfeed.sampling import BlockShuffling as BlockShuffling
    from cellfeed.sampling import EpochPlan as EpochPlan
    from cellfeed.sampling import Fetch as Fetch
    from cellfeed.sampling import SamplingStrategy as SamplingStrategy
    from cellfeed.sampling import Streaming as Streaming
    from cellfeed.splits import random_split as random_split
    from cellfeed.storages.huggingface import HuggingFaceSource as HuggingFaceSource
    from cellfeed.storages.memory_maps import MemoryMapSource as MemoryMapSource
    from cellfeed.storages.parquet import ParquetSource as ParquetSource
    from cellfeed.storages.postgres import PostgresSource as PostgresSource
    from cellfeed.storages.postgres._load_database import load_database as load_database
    from cellfeed.storages.soma import SomaSource as SomaSource
    from cellfeed.storages.tenx import TenxSource as TenxSource
    from cellfeed.storages.tokens import Span as Span
    from cellfeed.storages.tokens import TokenStream as TokenStream
    from cellfeed.storages.tokens import TokenStreamWriter as TokenStreamWriter
    from cellfeed.strategies import BlockWeightedSampling as BlockWeightedSampling
    from cellfeed.strategies import ClassBalancedSampling as ClassBalancedSampling
    from cellfeed.strategies import GroupedSampling as GroupedSampling

# Lazy, since most of these need other packages; keep in step with the TYPE_CHECKING block above.
_NAMES_OF = {
    "_errors": (
        "CellfeedError ColumnError DeliveryError FormatError MismatchError ParameterError "
        "PathError RemoteError StateError"
    ),
    "_version": "__version__",
    "collection": "Collection open_collection",
    "dataset": "CellDataset InterleavedDatasets ReadOptions Statistics",
    "genes": "highly_variable_genes qc_metrics",
    "perturbation": "MatchedControls PerturbationSplit perturbation_datasets perturbation_split",
    "preshuffling": "Preshuffled preshuffle",
    "rows": "CategoricalColumn Cells NumericColumn",
    "rows._minibatch": "Minibatch RaggedTensor",
    "sampling": "BlockShuffling EpochPlan Fetch SamplingStrategy Streaming",
    "splits": "random_split",
    "storages.huggingface": "HuggingFaceSource",
    "storages.memory_maps": "MemoryMapSource",
    "storages.parquet": "ParquetSource",
    "storages.postgres": "PostgresSource",
    "storages.postgres._load_database": "load_database",
    "storages.soma": "SomaSource",
    "storages.tenx": "TenxSource",
    "storages.tokens": "Span TokenStream TokenStreamWriter",
    "strategies": "BlockWeightedSampling ClassBalancedSampling GroupedSampling",
}
_MODULE_OF = {
    name: f"{__name__}.{module}" for module, names in _NAMES_OF.items() for name in names.split()
}
__all__ = tuple(sorted(_MODULE_OF))

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULE_OF:
            if name in _public_modules():
                return importlib.import_module(f"{__name__}.{name}")
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        with _lazy.garbage_collection_paused():
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_public_modules()})

    def _public_modules() -> set[str]:  # there without an import of their own
        names = {each.name for each in pkgutil.iter_modules(__path__)}
        return {name for name in names if not name.startswith("_")}
