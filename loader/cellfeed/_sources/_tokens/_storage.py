"""Folders that are token streams."""

import os
from collections.abc import Sequence
from pathlib import Path

from cellfeed._bytes import Location
from cellfeed._sources._base import Source, Storage, StorageFacts
from cellfeed._sources._tokens._format import SUFFIX, UNFINISHED
from cellfeed._sources._tokens._source import TokenStream

__all__ = ["TOKENS"]


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has all
    return [TokenStream(location)]


def _has_shards(path: Path) -> bool:
    """Return whether a folder contains shards, finished or not."""
    if not path.is_dir():
        return False
    with os.scandir(path) as entries:
        return any(
            (each.name.endswith(SUFFIX) and each.is_dir())
            or (each.name.startswith(".") and each.name.endswith(UNFINISHED))
            for each in entries
        )


TOKENS = Storage(
    name="token stream",
    open=_open,
    recognizes=_has_shards,
    facts=StorageFacts(
        recognized="a folder of shards written by `TokenStreamWriter`",
        reading="fast: windows and documents are read into place; spans by one thread",
        labels="the shard, obs of documents",
    ),
)
