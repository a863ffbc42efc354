"""Converting objects of other libraries to sources, or to the locations of their cells."""

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
    """Return the sources of an object, or its paths and URLs; None for other objects.

    Parameters
    ----------
    given
        `anndata.AnnData`, `anndata.experimental.AnnCollection`, `datasets.Dataset`, BioNeMo's
        ``SingleCellMemMapDataset``, or an Artifact, Collection, query set of artifacts or
        MappedCollection of lamindb. Objects are recognised by their attributes, without importing
        their libraries.
    elements
        Names of the elements to read.

    Raises
    ------
    FormatError, ParameterError
        The object cannot be read, or only in another form.
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
    """Return the paths and URLs where an object stores its cells."""
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
    """Return whether an object is of a class of a module, which then is imported already."""
    loaded = sys.modules.get(module)
    classes = (getattr(loaded, name, None) for name in names)
    return any(isinstance(given, each) for each in classes if isinstance(each, type))


def _of_artifact(artifact: Any) -> str:
    """Return the location of an artifact: its URL if cellfeed can open it, else a local copy."""
    location = Location.of(_location(artifact.path))
    if location.path is not None or location.scheme in SCHEMES:
        return str(location)
    return _location(artifact.cache())


def _location(path: Any) -> str:
    """Return a path or URL, such as a `upath.UPath`, as text."""
    return str(path).removeprefix("file://")
