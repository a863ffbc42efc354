"""Files that are archives of cellstream."""

from collections.abc import Sequence
from pathlib import Path

from cellfeed._bytes import Location
from cellfeed._sources._base import Source, Storage, StorageFacts
from cellfeed._sources._cellstream._source import CellstreamSource

__all__ = ["CELLSTREAM"]

_MAGIC = b"SHPK"


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has one
    return [CellstreamSource(location)]


def _is_archive(path: Path) -> bool:
    """Return whether a file begins like an archive, without importing cellstream."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


CELLSTREAM = Storage(
    name="cellstream",
    open=_open,
    suffixes=(".csad", ".shad"),
    recognizes=_is_archive,
    extra="cellstream",
    facts=StorageFacts(
        recognized="a file with the header of `.csad` and `.shad`, and one frame per cell",
        reading="fast: cellstream's compiled decoder writes into minibatches",
    ),
)
