"""Collections in PostgreSQL: cells and packed rows, read by key over many connections."""

from cellfeed._sources._postgres._source import PostgresSource
from cellfeed._sources._postgres._storage import POSTGRES

__all__ = ["POSTGRES", "PostgresSource"]
