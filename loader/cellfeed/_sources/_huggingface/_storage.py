"""Folders that HuggingFace's library wrote."""

from collections.abc import Sequence

from cellfeed._bytes import Location
from cellfeed._sources._base import Source, Storage
from cellfeed._sources._huggingface._source import HuggingFaceSource
from cellfeed._sources._huggingface._tables import is_saved

__all__ = ["HUGGINGFACE"]


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has X
    return [HuggingFaceSource(location)]


HUGGINGFACE = Storage(name="HuggingFace Datasets", open=_open, recognizes=is_saved)
