"""Parquet files of cells: their pages are decoded here, pyarrow reads everything else."""

from cellfeed.storages.parquet._source import PARQUET, ParquetSource

__all__ = ["PARQUET", "ParquetSource"]
