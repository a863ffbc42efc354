"""Datasets that a training loop iterates over: epochs, ranks, workers, the DataLoader."""

from cellfeed.dataset._cell_dataset import CellDataset
from cellfeed.dataset._interleaved import InterleavedDatasets
from cellfeed.dataset._loader import MinibatchLoader
from cellfeed.dataset._parameters import ReadOptions, require_callables
from cellfeed.dataset._resumable import Statistics

__all__ = [
    "CellDataset",
    "InterleavedDatasets",
    "MinibatchLoader",
    "ReadOptions",
    "Statistics",
    "require_callables",
]
