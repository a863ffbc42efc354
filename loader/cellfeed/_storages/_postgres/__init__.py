"""Collections in PostgreSQL: cells and packed rows, read by key over many connections."""

from cellfeed._storages._postgres._source import POSTGRES, PostgresSource
