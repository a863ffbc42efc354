"""Folders that HuggingFace's ``datasets`` library wrote."""

from collections.abc import Sequence

from cellfeed._bytes import Location
from cellfeed._sources._base import Source, Storage, StorageFacts
from cellfeed._sources._huggingface._source import HuggingFaceSource
from cellfeed._sources._huggingface._tables import is_saved

__all__ = ["HUGGINGFACE"]


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has X
    return [HuggingFaceSource(location)]


HUGGINGFACE = Storage(
    name="HuggingFace Datasets",
    open=_open,
    recognizes=is_saved,
    extra="huggingface",
    facts=StorageFacts(
        recognized="a folder written by `save_to_disk`; a `datasets.Dataset`; `HuggingFaceSource`",
        reading="fast: lists are read directly from Arrow files; compressed ones by pyarrow",
        labels="columns of numbers, booleans, text and class labels",
    ),
)
