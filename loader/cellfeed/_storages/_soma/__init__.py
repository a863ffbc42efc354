"""TileDB-SOMA experiments: sparse arrays are decoded here, tiledbsoma reads everything else."""

from cellfeed._storages._soma._source import SOMA, SomaSource
