"""URLs of PostgreSQL servers."""

from collections.abc import Sequence

from cellfeed._bytes import Location
from cellfeed._sources._base import Source, Storage, StorageFacts
from cellfeed._sources._postgres._source import PostgresSource

__all__ = ["POSTGRES"]


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has all
    return [PostgresSource(location)]


POSTGRES = Storage(
    name="PostgreSQL",
    open=_open,
    schemes=("postgresql", "postgres"),
    extra="postgres",
    facts=StorageFacts(
        recognized="`postgresql://host/database?collection=NAME`, written by `cellfeed "
        "load-database`; or a `PostgresSource` with a condition",
        reading="packed rows, requested by key over pipelined connections, unpacked in compiled "
        "code by one thread",
        threads="one",
        remote="yes",
    ),
)
