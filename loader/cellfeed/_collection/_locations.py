"""Which sources the given paths, folders, patterns and URLs stand for."""

import errno
import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cellfeed._bytes import SCHEMES, Location, StorageOptions
from cellfeed._collection._side_by_side import side_by_side
from cellfeed._errors import ParameterError, PathError
from cellfeed._remote import expand_url
from cellfeed._sources import (
    Source,
    Storage,
    find_storage,
    locations_or_sources,
    open_location,
    select_elements,
    storage_of,
    suffixes,
)

__all__ = ["Given", "open_sources_of"]

PathLike = str | os.PathLike[str]
Given = PathLike | Source
_UNORDERED = (set, frozenset)  # each process would list it in another order


def open_sources_of(
    given: Any,
    elements: Sequence[str],
    options: StorageOptions | None = None,
) -> list[Source]:
    """Open the sources of all given locations.

    Parameters
    ----------
    given
        Paths, folders, patterns and URLs, open sources, and objects of other libraries; see
        `open_collection`.
    elements
        The elements to read.
    options
        How to reach servers and read files.

    Raises
    ------
    PathError
        A path is missing, matches no file or is given twice, or no storage opens such URLs.
    FormatError
        No storage opens a file, or its storage cannot read it.
    ParameterError
        An object cannot be opened, or is given twice.
    """
    one_or_more = _listed(given, elements, {})
    if not one_or_more:
        msg = "no path was given; give .h5ad files or zarr stores, a folder of them, or a pattern"
        raise PathError(msg)
    if options is not None and options.direct:
        _check_closed(one_or_more)
    found = [each for where in one_or_more for each in _found(where, options)]
    seen = set[Location | Path]()
    for location in (each.location for each in found if isinstance(each, _Found)):
        resolved = location.path.resolve() if location.path else location
        if resolved in seen:
            msg = f"{location}: given twice, so its cells would count twice; give it once"
            raise PathError(msg)
        seen.add(resolved)
    opened = side_by_side(partial(_open, elements=elements), found)
    return [source for sources in opened for source in sources]


def _listed(given: Any, elements: Sequence[str], seen: dict[int, Any]) -> list[Given]:
    """Return the given paths, URLs and sources, including those of objects of other libraries.

    ``seen`` holds the objects so far, by `id`.
    """
    if isinstance(given, str | os.PathLike):
        return [given]
    is_open = isinstance(given, Source)
    found: list[Given] | None = [given] if is_open else locations_or_sources(given, elements)
    if found is not None:
        if id(given) in seen:
            msg = f"the same `{type(given).__name__}` is given twice, so its cells would"
            raise ParameterError(f"{msg} count twice; give it once")
        seen[id(given)] = given
        return found
    is_listed = isinstance(given, Iterable) and not isinstance(given, (bytes, Mapping, *_UNORDERED))
    if not is_listed or _is_matrix(given):
        remedy = "give paths, URLs, sources or AnnData"
        if _is_matrix(given):
            remedy = "wrap it in `anndata.AnnData(X)`"
        elif isinstance(given, Mapping):
            remedy = "give a list of its values"
        elif isinstance(given, bytes):
            remedy = "decode it with `os.fsdecode`"
        elif isinstance(given, _UNORDERED):
            remedy = "it has no order; give a sorted list"
        raise ParameterError(f"`{type(given).__name__}` cannot be opened; {remedy}")
    return [each for one in given for each in _listed(one, elements, seen)]


def _is_matrix(given: Any) -> bool:
    """Return whether an object has a shape but is no list of texts, as a pandas Series may be."""
    shape = getattr(given, "shape", None)
    kind = getattr(getattr(given, "dtype", None), "kind", None)
    return shape is not None and not (len(shape) == 1 and kind in ("O", "U", "T"))


def _check_closed(given: Sequence[Given]) -> None:
    """Refuse open sources if direct I/O is requested, which applies to paths."""
    for each in given:
        if isinstance(each, Source):
            msg = f"`direct_io` applies only to paths, but got an open `{type(each).__name__}`"
            raise ParameterError(f"{msg}; give its path, or leave `direct_io` out")


class _Found(NamedTuple):
    location: Location
    storage: Storage


def _found(where: Given, options: StorageOptions | None) -> "list[_Found | Source]":
    if isinstance(where, Source):
        return [where]
    location = _located(where, options)
    found = [_Found(*each) for each in _expand(location)]
    if location.path is None or not location.options.direct:
        return [*found]
    direct = StorageOptions(direct=True)
    return [_Found(each.location.with_options(direct), each.storage) for each in found]


def _open(found: _Found | Source, elements: Sequence[str]) -> list[Source]:
    if isinstance(found, Source):
        return [select_elements(found, elements)]
    return open_location(found.storage, found.location, elements)


def _located(where: PathLike, options: StorageOptions | None) -> Location:
    location = Location.of(where)
    return location if options is None else location.with_options(options)


def _expand(location: Location) -> list[tuple[Location, Storage]]:
    """Return the locations of a path, folder, pattern or URL."""
    if location.scheme in SCHEMES:
        storage = storage_of(location)
        names = list(storage.suffixes or suffixes())
        return [(each, storage) for each in expand_url(location, names)]
    if location.path is None:
        return [(location, storage_of(location))]
    try:
        path = location.path.expanduser()
    except RuntimeError:
        msg = f"{location}: this home folder is not known; write the path without ~"
        raise PathError(msg) from None
    try:
        if path.is_dir():
            return _of_folder(path)
        if path.exists():
            return [_known(path)]
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        msg = f"{location}: the path is too long for the file system; check it"
        raise PathError(msg) from None
    matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute patterns too
    if not matches:
        what = "matches no file" if glob.has_magic(str(path)) else "no such file or folder"
        raise PathError(f"{path}: {what}; check the path")
    return [_known(Path(match)) for match in matches]


def _of_folder(path: Path) -> list[tuple[Location, Storage]]:
    """Return a folder itself if it is a store, else the files in it that can be opened, by name."""
    own = find_storage(Location.of(path))
    if own is not None:
        return [(Location.of(path), own)]
    known = suffixes()
    found = [
        (Location.of(entry), known[suffix])
        for entry in sorted(path.iterdir())
        for suffix in known
        if entry.name.endswith(suffix)
    ]
    if not found:
        msg = f"{path}: the folder has nothing that can be opened ({', '.join(known)}); "
        raise PathError(msg + "give the folder that holds them")
    return found


def _known(path: Path) -> tuple[Location, Storage]:
    return Location.of(path), storage_of(Location.of(path))
