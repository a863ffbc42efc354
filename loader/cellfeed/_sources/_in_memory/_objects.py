"""What objects of other libraries stand for: sources, or where their cells are stored."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from cellfeed._bytes import SCHEMES, Location
from cellfeed._errors import ParameterError
from cellfeed._sources._base import Source
from cellfeed._sources._huggingface import HuggingFaceSource
from cellfeed._sources._in_memory._source import AnnDataObjectSource

__all__ = ["locations_or_sources"]

_ANNCOLLECTION = "anndata.experimental.multi_files._anncollection"

Found = list[str | os.PathLike[str] | Source]


def locations_or_sources(given: Any, elements: Sequence[str]) -> Found | None:
    """Return the sources that an object stands for, or paths and URLs; None if it is no such.

    Parameters
    ----------
    given
        `anndata.AnnData`, `anndata.experimental.AnnCollection`, `datasets.Dataset`, BioNeMo's
        ``SingleCellMemMapDataset``, or what lamindb calls Artifact, Collection, a query set of
        artifacts, and MappedCollection. Libraries are known by what their objects offer, and none
        is imported.
    elements
        What is read of each.

    Raises
    ------
    FormatError, ParameterError
        It cannot be read, or only in another form.
    """
    if _is_of(given, "anndata", "AnnData"):
        return [AnnDataObjectSource(given, elements)]
    if _is_of(given, _ANNCOLLECTION, "AnnCollectionView"):
        msg = "a view of an AnnCollection cannot be opened"
        raise ParameterError(f"{msg}; give the whole object, and select rows of the collection")
    if _is_of(given, _ANNCOLLECTION, "AnnCollection"):
        return [AnnDataObjectSource(adata, elements) for adata in given.adatas]
    if _is_of(given, "datasets", "Dataset", "IterableDataset", "DatasetDict"):
        return [HuggingFaceSource(given)]
    return _locations_of(given)


def _locations_of(given: Any) -> Found | None:
    """Return the paths and URLs that an object says its cells are at."""
    if hasattr(given, "data_path") and hasattr(given, "row_index"):  # of BioNeMo
        return [str(given.data_path)]
    if hasattr(given, "path_list"):  # MappedCollection
        return [_location(each) for each in given.path_list]
    if hasattr(given, "ordered_artifacts"):  # lamindb.Collection
        return [_of_artifact(each) for each in given.ordered_artifacts.all()]
    if hasattr(given, "cache") and hasattr(given, "path"):  # lamindb.Artifact
        return [_of_artifact(given)]
    return None


def _is_of(given: Any, module: str, *names: str) -> bool:
    """Return whether an object is of a class of a module, which was imported if it is."""
    loaded = sys.modules.get(module)
    classes = (getattr(loaded, name, None) for name in names)
    return any(isinstance(given, each) for each in classes if isinstance(each, type))


def _of_artifact(artifact: Any) -> str:
    """Return where an artifact is: its URL if that is opened here, else a copy on this machine."""
    location = Location.of(_location(artifact.path))
    if location.path is not None or location.scheme in SCHEMES:
        return str(location)
    return _location(artifact.cache())


def _location(path: Any) -> str:
    """Return a path or URL, such as that of a `upath.UPath`, as text."""
    return str(path).removeprefix("file://")
