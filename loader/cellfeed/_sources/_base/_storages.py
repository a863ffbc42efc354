"""Which storages there are, and which of them opens a location."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from cellfeed._bytes import Location
from cellfeed._errors import FormatError, ParameterError, PathError
from cellfeed._sources._base._source import Source

__all__ = [
    "Storage",
    "StorageFacts",
    "built_in",
    "find_storage",
    "open_location",
    "register",
    "select_elements",
    "storage_of",
    "suffixes",
]

_ENTRY_POINTS = "cellfeed.sources"
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """What a table of storages says of one, in a few words of Markdown each.

    Parameters
    ----------
    recognized
        What is recognised as it.
    reading
        Who decodes rows, whether that is the fast path, and why if not.
    threads
        In how many threads.
    remote
        Where else than on this machine it may lie.
    labels
        What ``obs=``, and ``label=`` of autotune, may name.
    """

    recognized: str
    reading: str
    threads: str = "any number"
    remote: str = "no"
    labels: str = "obs columns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A kind of storage: what its locations look like, and what opens one.

    A package offers it as an entry point of the group ``cellfeed.sources``, of any name, so that it
    is there wherever the package is installed::

        [project.entry-points."cellfeed.sources"]
        soma = "my_package.storage:SOMA"

    Entry points are loaded when a location is met that nothing else opens. It should be in a module
    that is imported quickly, and import its libraries when it opens something.

    Parameters
    ----------
    name
        What it is called, such as "TileDB-SOMA".
    open
        Called with a location and the names of the elements to be read; returns the sources that
        are there, in the order of their rows, each with just these elements. A source without
        one of them may be returned as it is: that is seen from ``Source.elements``.
    schemes
        Which URLs it opens: ``("soma",)`` for ``soma://...``.
    suffixes
        Which files and folders of this machine, by the end of their names: ``(".h5ad",)``.
    recognizes
        Says by content whether it opens a path, in place of ``suffixes``, which then say only
        what is taken out of a folder of several.
    extra
        The extra of cellfeed that installs the library it needs; empty if it needs none.
    reads_directly
        Whether it reads past the page cache where ``location.options.direct`` says so.
    facts
        What the page "What can be opened" says of a storage that comes with cellfeed.

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
    recognizes: Callable[[Path], bool] | None = None
    extra: str = ""
    reads_directly: bool = False
    facts: StorageFacts | None = None

    def opens(self, location: Location) -> bool:
        """Return whether it opens a location, which exists if it is on this machine."""
        if location.path is None:
            return location.scheme in self.schemes
        if self.recognizes is not None:
            return self.recognizes(location.path)
        return location.path.name.endswith(self.suffixes)

    def __str__(self) -> str:
        marks = ", ".join([*self.suffixes, *(f"{scheme}://" for scheme in self.schemes)])
        return f"{self.name} ({marks})" if marks else self.name


_registered = dict[str, Storage]()


def register(storage: Storage) -> None:
    """Let `open_collection` open a kind of storage, in this process.

    Those that are registered later are asked first; one of the same name is replaced.

    Parameters
    ----------
    storage
        What is registered.
    """
    _registered.pop(storage.name, None)
    _registered[storage.name] = storage


def built_in() -> tuple[Storage, ...]:
    """Return the storages that were registered in this process, in the order they were."""
    return tuple(_registered.values())


def find_storage(location: Location) -> Storage | None:
    """Return the storage that opens a location, None if there is none."""
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
        msg = f"{location.shown}: nothing is known that opens {location.scheme}://"
        if location.scheme == "tiledb":
            raise PathError(f"{msg} as a path; `SomaSource(uri)` opens it")
        raise PathError(f"{msg}; known are {known}; install the package that does")
    if location.text.endswith(_PACKED):
        raise FormatError(f"{location}: a compressed file or an archive; unpack it first")
    raise FormatError(
        f"{location}: nothing is known that opens it; known are {known}; give one of these"
    )


def suffixes() -> dict[str, Storage]:
    """Return the suffixes of what is opened in a folder, each with its storage."""
    return {suffix: storage for storage in reversed([*_all()]) for suffix in storage.suffixes}


def open_location(storage: Storage, location: Location, elements: Sequence[str]) -> list[Source]:
    """Open the sources at a location, which have these elements.

    Raises
    ------
    ParameterError
        It is to be read past the page cache, and cannot.
    FormatError
        One of them lacks an element; and whatever the storage raises.
    """
    if location.options.direct and (location.path is None or not storage.reads_directly):
        whose = "is not on this machine" if location.path is None else f"is {storage.name}"
        msg = f"{location.shown}: {whose}, and `direct_io` is for h5ad and zarr on this machine"
        raise ParameterError(f"{msg}; open it without `direct_io`")
    return [select_elements(each, elements) for each in storage.open(location, elements)]


def select_elements(source: Source, names: Sequence[str]) -> Source:
    """Return a source with just these of its elements, in this order; itself if it has no others.

    Raises
    ------
    FormatError
        It lacks one.
    """
    if list(source.elements) == list(names):
        return source
    for name in names:
        if name not in source.elements:
            there = ", ".join(f"`{each}`" for each in source.elements)
            listed = f"its elements are: {there}" if there else "it has no elements"
            raise FormatError(f"{source.location}: has no `{name}`; {listed}")
    selected = copy(source)
    selected.elements = {name: source.elements[name] for name in names}
    return selected


def _all() -> Iterator[Storage]:
    """Yield the storages, in the order in which they are asked; the last are loaded for that."""
    yield from reversed([*_registered.values()])
    yield from (each for each in _installed() if each.name not in _registered)


@cache
def _installed() -> tuple[Storage, ...]:
    """Return what installed packages offer."""
    found = list[Storage]()
    for entry in entry_points(group=_ENTRY_POINTS):
        try:
            storage = entry.load()
        except Exception as error:  # noqa: BLE001 - whatever the import of a package raises
            msg = f"the entry point {entry.value!r} of {_ENTRY_POINTS} cannot be loaded ({error})"
            warnings.warn(f"{msg}; update or remove its package", RuntimeWarning, stacklevel=2)
            continue
        if isinstance(storage, Storage):
            found.append(storage)
            continue
        msg = f"the entry point {entry.value!r} of {_ENTRY_POINTS} is no `cellfeed.sources.Storage`"
        warnings.warn(f"{msg}; update or remove its package", RuntimeWarning, stacklevel=2)
    return tuple(found)
