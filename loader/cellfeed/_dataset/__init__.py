"""The data set that a training loop iterates over: epochs, ranks, workers, its DataLoader."""

from cellfeed._dataset._cell_dataset import CellDataset
from cellfeed._dataset._interleaved import InterleavedDatasets

__all__ = ["CellDataset", "InterleavedDatasets"]
