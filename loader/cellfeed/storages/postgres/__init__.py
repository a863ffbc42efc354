"""Collections in PostgreSQL: cells and packed rows, read by key over many connections."""

from cellfeed.storages.postgres._source import POSTGRES, PostgresSource

__all__ = ["POSTGRES", "PostgresSource"]
