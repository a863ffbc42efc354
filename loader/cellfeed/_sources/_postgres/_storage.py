"""URLs of PostgreSQL servers."""

from collections.abc import Sequence

from cellfeed._bytes import Location
from cellfeed._sources._base import Source, Storage
from cellfeed._sources._postgres._source import PostgresSource

__all__ = ["POSTGRES"]


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has all
    return [PostgresSource(location)]


POSTGRES = Storage(name="PostgreSQL", open=_open, schemes=("postgresql", "postgres"))
