"""Datasets that a training loop iterates over: epochs, ranks, workers, the DataLoader."""

from cellfeed._dataset._cell_dataset import CellDataset
from cellfeed._dataset._interleaved import InterleavedDatasets
from cellfeed._dataset._parameters import ReadOptions
from cellfeed._dataset._statistics import Statistics
