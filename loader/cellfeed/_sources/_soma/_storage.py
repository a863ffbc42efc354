"""Folders that are TileDB-SOMA experiments."""

from collections.abc import Sequence
from pathlib import Path

from cellfeed._bytes import Location
from cellfeed._sources._base import Source, Storage, StorageFacts
from cellfeed._sources._soma._source import SomaSource

__all__ = ["SOMA"]


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has all
    return [SomaSource(location)]


def _is_group(path: Path) -> bool:
    """Return whether a folder is a group of TileDB, without importing tiledbsoma."""
    return (path / "__group").is_dir() or (path / "__tiledb_group.tdb").is_file()


SOMA = Storage(
    name="TileDB-SOMA",
    open=_open,
    suffixes=(".soma",),
    recognizes=_is_group,
    extra="soma",
    facts=StorageFacts(
        recognized="a folder that is a TileDB group, or a `SomaSource` with a query",
        reading=(
            "local sparse arrays: compiled threads decode the tiles; others: tiledbsoma, one query "
            "per fetch"
        ),
        threads="any number; TileDB's own where tiledbsoma reads",
        remote="TileDB URIs, with `SomaSource`",
    ),
)
