"""The registry of storages, which finds the storage that opens a location."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from cellfeed._errors import CellfeedError, FormatError, ParameterError, PathError, require_one_of
from cellfeed.bytes import SCHEMES, Location, has_suffix
from cellfeed.rows import Layout
from cellfeed.sources._source import Source, StoredElement

_ENTRY_POINTS = "cellfeed.sources"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A kind of storage, with the locations that it recognizes and the function that opens them.

    A package declares it as an entry point in the group ``cellfeed.sources``, under any name, so
    that it is available wherever the package is installed::

        [project.entry-points."cellfeed.sources"]
        soma = "my_package.storage:SOMA"

    Entry points are loaded when no other storage opens a location. The module of the entry point
    should be quick to import, and import its libraries only when it opens a location.

    Parameters
    ----------
    name
        Name of the storage, such as "TileDB-SOMA".
    open
        Called with a location and the names of the elements to read; returns the sources at the
        location, in the order of their rows. A source may have more elements, of which these are
        selected; one that lacks an element is refused.
    schemes
        Schemes of the URLs that it opens: ``("soma",)`` for ``soma://...``.
    suffixes
        Suffixes of the local files and folders that it opens, in any case: ``(".h5ad",)``.
    url_suffixes
        Suffixes of URLs on web servers and in object stores that it opens, also of patterns, whose
        objects ``open`` lists itself.
    recognizes
        Returns whether it opens a path, by its content, in place of ``suffixes``, which then only
        select entries of a folder.
    parts
        Suffixes of what is in a folder of an object store that it opens as a whole.
    open_hdf5
        Called with HDF5 files that are not AnnData, a `cellfeed.sources.anndata.H5File`; returns
        its `cellfeed.sources.anndata.FileSource`, or None if the file has another layout.
    open_object
        Called with what is no location; returns the source, or None if it is no object of this
        storage. It should look at `sys.modules` rather than import a library.

    Raises
    ------
    ParameterError
        Suffixes are no tuple of texts that begin with a dot.

    Examples
    --------
    >>> from cellfeed.sources import Location, Storage
    >>> storage = Storage(name="SOMA", open=lambda location, elements: [], schemes=("soma",))
    >>> storage.opens(Location("soma://host/experiment"))
    True
    """

    name: str
    open: Callable[[Location, Sequence[str]], Sequence[Source]]
    schemes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    url_suffixes: tuple[str, ...] = ()
    recognizes: Callable[[Path], bool] | None = None
    parts: tuple[str, ...] = ()
    open_hdf5: Callable[[Any], Any] | None = None
    open_object: Callable[[Any], Source | None] | None = None

    def __post_init__(self) -> None:
        """Check the suffixes."""
        for name in ("suffixes", "url_suffixes"):
            given: Any = getattr(self, name)
            if isinstance(given, str) or not all(each.startswith(".") for each in given):
                msg = f'`{name}` of {self.name} must be like (".h5ad",), but got {given!r}'
                raise ParameterError(msg)

    def opens(self, location: Location) -> bool:
        """Return whether it opens a location; a local location must exist."""
        if location.path is None:
            is_url = location.scheme in SCHEMES and has_suffix(location.text, *self.url_suffixes)
            return location.scheme in self.schemes or (is_url and bool(self.url_suffixes))
        if self.recognizes is not None:
            return self.recognizes(location.path)
        return has_suffix(location.path.name, *self.suffixes)

    def __str__(self) -> str:
        names = [*self.suffixes, *self.url_suffixes, *(f"{each}://" for each in self.schemes)]
        marks = ", ".join(names)
        return f"{self.name} ({marks})" if marks else self.name


_registered = dict[str, Storage]()
_STORAGES = "cellfeed.storages"  # whose folders declare the others that cellfeed brings

# First bytes of files that are taken for single-cell data, in lower case.
_LONGEST = 64
_COMPRESSED = "compressed; unpack it or, if R wrote it, write .h5ad from R"
_OTHERS = (
    (b"version https://git-lfs", "a pointer of Git LFS; get the file with `git lfs pull`"),
    ((b"<!doctype html", b"<html"), "a web page, not the file that it leads to; download that"),
    (b"par1", "a Parquet file; give it a name that ends with .parquet"),
    (b"%%matrixmarket", "a Matrix Market file; read it with `scanpy.read_mtx`, and write .h5ad"),
    ((b"\x1f\x8b", b"bzh", b"\xfd7zxz", b"\x28\xb5\x2f\xfd", b"pk\x03\x04"), _COMPRESSED),
    (b"rdx", "of R; write .h5ad from R, for example with zellkonverter or anndataR"),
)


def register(storage: Storage) -> None:
    """Register a storage, so that `open_collection` opens it in this process.

    Storages that are registered later are tried first; one with the same name is replaced.

    Parameters
    ----------
    storage
        The storage.
    """
    _registered.pop(storage.name, None)
    _registered[storage.name] = storage


def built_in() -> tuple[Storage, ...]:
    """Return the storages of cellfeed, and those registered in this process, in that order."""
    own = (each for each in _own() if each.name not in _registered)
    return (*own, *_registered.values())


def opened_by(hook: Literal["open_hdf5", "open_object"], given: Any) -> Any:
    """Return the source of an HDF5 file or an object; None if no storage knows it."""
    hooks = filter(None, (getattr(each, hook) for each in _all()))
    return next((found for each in hooks if (found := each(given)) is not None), None)


def find_storage(location: Location) -> Storage | None:
    """Return the storage that opens a location; None if there is none."""
    return next((storage for storage in _all() if storage.opens(location)), None)


def storage_of(location: Location) -> Storage:
    """Return the storage that opens a location.

    Raises
    ------
    PathError
        No storage is known for such URLs.
    FormatError
        No storage is known for such a file or folder.
    """
    storage = find_storage(location)
    if storage is not None:
        return storage
    known = "; ".join(map(str, _all()))
    if location.scheme:
        msg = f"{location.shown}: no storage opens {location.scheme}://"
        if location.scheme == "tiledb":
            raise PathError(f"{msg} as a path; `SomaSource(uri)` opens it")
        if location.scheme == "file":
            raise PathError(f"{msg}; give its path")
        raise PathError(f"{msg}; known are {known}; install the package that adds it")
    other = other_format(location)
    if other is not None:
        raise FormatError(f"{location}: is {other}")
    raise FormatError(f"{location}: no storage opens it; known are {known}; give one of these")


def other_format(location: Location) -> str | None:
    """Return what a file that no storage opens is, by its first bytes, and what to do."""
    try:
        with open(location, "rb") as file:  # noqa: PTH123 - of a location
            begin = file.read(_LONGEST).lstrip()
    except OSError:
        return None
    if not begin:
        return "empty; copy or download it again"
    return next((what for mark, what in _OTHERS if begin.lower().startswith(mark)), None)


def suffixes() -> dict[str, Storage]:
    """Return the suffixes that are opened in folders, each with its storage."""
    return {suffix: storage for storage in reversed([*_all()]) for suffix in storage.suffixes}


def open_location(storage: Storage, location: Location, elements: Sequence[str]) -> list[Source]:
    """Open the sources at a location, each with exactly these elements.

    Raises
    ------
    FormatError
        A source lacks an element, or the storage raises it.
    ParameterError
        The storage returns something else, or a source does not state what it must.
    """
    opened: Any = storage.open(location, elements)
    if not isinstance(opened, (list, tuple)):
        msg = f"{location}: `open` of {storage.name} must return a list of sources, but returned"
        raise ParameterError(f"{msg} {opened!r}")
    return [select_elements(each, elements) for each in opened]


def select_elements(source: Source, names: Sequence[str]) -> Source:
    """Return a source with exactly these elements, in this order; itself if it has no others.

    Raises
    ------
    FormatError
        It lacks an element.
    ParameterError
        It, or one of these elements, does not state what it must.
    """
    _require_stated(source, location=Location, elements=Mapping)
    for name in names:
        if name not in source.elements:
            there = ", ".join(f"`{each}`" for each in source.elements)
            listed = f"its elements are: {there}" if there else "it has no elements"
            raise FormatError(f"{source.location}: has no `{name}`; {listed}")
        stored = source.elements[name]
        _require_stated(stored, shape=tuple, dtype=np.dtype)
        layout = getattr(stored, "layout", None)
        require_one_of(f"layout` of `{type(stored).__name__}", layout, get_args(Layout))
    if list(source.elements) == list(names):
        return source
    selected = copy(source)
    selected.elements = {name: source.elements[name] for name in names}
    return selected


def _require_stated(stating: Source | StoredElement, **kinds: type) -> None:
    """Check that a source or an element has attributes of these types."""
    for name, kind in kinds.items():
        value = getattr(stating, name, None)
        if not isinstance(value, kind):
            msg = f"`{name}` of `{type(stating).__name__}` must be a `{kind.__name__}`, but is"
            raise ParameterError(f"{msg} {value!r}")


def _all() -> Iterator[Storage]:
    """Yield the storages, in the order in which they are tried; entry points are loaded last."""
    known = built_in()
    yield from reversed(known)
    names = {each.name for each in known}
    yield from (each for each in _installed() if each.name not in names)


@cache
def _own() -> tuple[Storage, ...]:
    """Return the storages of cellfeed: AnnData, and what the folders of ``storages`` declare."""
    names = ["cellfeed.sources.anndata"]
    if find_spec(_STORAGES) is not None:
        folders = pkgutil.iter_modules(import_module(_STORAGES).__path__, f"{_STORAGES}.")
        names += [each.name for each in folders]
    declared = (vars(import_module(name)).values() for name in names)
    return tuple(each for found in declared for each in found if isinstance(each, Storage))


@cache
def _installed() -> tuple[Storage, ...]:
    """Return the storages that installed packages declare."""
    found = list[Storage]()
    for entry in entry_points(group=_ENTRY_POINTS):
        try:
            storage, wrong = entry.load(), "is not a `cellfeed.sources.Storage`"
        except Exception as error:  # noqa: BLE001 - whatever the import of a package raises
            storage, wrong = None, f"cannot be loaded ({error})"
        if isinstance(storage, Storage):
            found.append(storage)
        else:
            msg = f"the entry point {entry.value!r} of {_ENTRY_POINTS} {wrong}"
            warnings.warn(f"{msg}; update or remove its package", RuntimeWarning, stacklevel=2)
    return tuple(found)


# Optional libraries that read a storage, installed with an extra.


def library(name: str, location: Location, *, what: str, extra: str) -> Any:
    """Return a module that only some storages need, imported when one of them is opened.

    Parameters
    ----------
    name
        Name of the module.
    location
        The location being opened, for the message.
    what
        Name of the storage, such as "TileDB-SOMA".
    extra
        The extra of cellfeed that installs the library.

    Raises
    ------
    FormatError
        The library is not installed, or cannot be imported.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        msg = f"{location}: reading {what} requires {package}"
        raise FormatError(f"{msg}; install it: pip install 'cellfeed[{extra}]'") from error


@contextmanager
def failures_named(
    what: str, remedy: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Convert errors of a library into a `FormatError` of one line.

    Parameters
    ----------
    what, remedy
        What cannot be read, and what to do; between them comes the first line of the error.
    kinds
        The errors to convert; by default, all but cellfeed's own.
    """
    try:
        yield
    except CellfeedError:
        raise
    except kinds as error:
        raise FormatError(f"{what} ({first_line(error)}); {remedy}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    said = str(error).strip().splitlines()
    return said[0].rstrip(".") if said else type(error).__name__
