"""What all formats of stored AnnData share: an interface to files, and attributes as text.

h5py returns variable-length strings as `str`, but strings of fixed length, as Julia's HDF5 writes
them, as bytes; R writes each as an array of one.
"""

from __future__ import annotations

import abc
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cellfeed._errors import FormatError
from cellfeed._lazy import ad, pd
from cellfeed.bytes import LastingIdentity, Location, digest_of, lasting_identity
from cellfeed.bytes._tables import CachedTables, Computed, Tables
from cellfeed.decode import ChunkedArray, SlowRead
from cellfeed.decode._hdf5 import hdf5_in_memory
from cellfeed.sources._source import OpenedPerProcess, Source

# Attributes, and elements as anndata reads them.

_OF_ONE = ("encoding-type", "encoding-version", "_index", "ordered", "h5sparse_format")


class StructureError(ValueError):
    """An element is not as anndata writes it, though nothing is damaged."""


def text(element: Any, name: str, default: str = "") -> str:
    """Return an attribute of a group or array as text.

    Raises
    ------
    StructureError
        It is something else.
    """
    value = _plain(name, element.attrs.get(name, default))
    if not isinstance(value, str):
        raise StructureError(f"the attribute `{name}` of {element.name} is not text, but {value!r}")
    return value


def texts(element: Any, name: str) -> tuple[str, ...]:
    """Return an attribute that is a list of texts; empty if there is none."""
    value = _plain(name, element.attrs.get(name, ()))
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def flag(element: Any, name: str) -> bool:
    """Return an attribute that is true or false."""
    return bool(_plain(name, element.attrs.get(name, False)))


def index_of(table: Any) -> str:
    """Return the name of the column that is the index of a table.

    Raises
    ------
    StructureError
        The table does not have one.
    """
    index = text(table, "_index")
    if index not in table:
        what = f"a column {index!r}, its index" if index else "an attribute `_index`"
        raise StructureError(f"{table.name} lacks {what}")
    return index


def is_group(element: Any) -> bool:
    """Return whether an element is a group, not an array."""
    return not hasattr(element, "dtype")


def own_members(group: Any) -> dict[str, Any]:
    """Return the arrays and groups in a group of HDF5 or zarr, without links."""
    names = list(group)
    if isinstance(group, h5py.Group):
        names = [n for n in names if isinstance(group.get(n, getlink=True), h5py.HardLink)]
    found = {name: group.get(name) for name in names}
    return {name: each for name, each in found.items() if each is not None}


def read_element(element: Any) -> Any:
    """Return an element as anndata reads it.

    anndata cannot read elements of HDF5 whose attributes are arrays of one text, so it gets a copy
    in memory, with attributes as it writes them.
    """
    if not isinstance(element, h5py.Group | h5py.Dataset):
        return ad.io.read_elem(element)
    with hdf5_in_memory() as memory:
        memory.copy(element, "element", expand_soft=True)

        def mend(_name: str, each: h5py.Group | h5py.Dataset) -> None:
            for name, value in list(each.attrs.items()):
                plain = _plain(name, value)
                if plain is not value:
                    each.attrs[name] = plain

        memory.visititems(mend)
        return ad.io.read_elem(memory["element"])


def _plain(name: str, value: Any) -> Any:
    """Return an attribute as anndata writes it; the same object if it is already.

    Raises
    ------
    StructureError
        It is an array where one value is expected.
    """
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray):
        if name in _OF_ONE:
            if value.size != 1:
                raise StructureError(f"the attribute `{name}` is not one value, but {value!r}")
            only = value.reshape(-1)[0]
            return only.decode() if isinstance(only, bytes) else only
        if value.dtype.kind in "SO" and any(isinstance(each, bytes) for each in value.flat):
            decoded = [e.decode() if isinstance(e, bytes) else e for e in value.flat]
            return np.array(decoded, dtype=object).reshape(value.shape)
    return value


# The interface to file formats: h5ad and zarr differ only in how they implement it.


class AnnDataFile(OpenedPerProcess):
    """A stored AnnData object, opened lazily in each process, and never for writing.

    Calling it returns the group that contains ``X``, ``obs`` and ``var``. h5py and zarr have groups
    and arrays with the same interface, so these are not wrapped.

    Parameters
    ----------
    location
        The file, folder or URL.

    Attributes
    ----------
    library
        The library that reads arrays that cellfeed does not decode: ``"h5py"`` or ``"zarr"``.
    linked_files
        Other local files that its elements are linked to, as far as they have been read.
    """

    library: str
    linked_files: Sequence[Path] = ()

    def __init__(self, location: Location) -> None:
        self.location = location

    @abstractmethod
    def watch(self, names: Sequence[str]) -> None:
        """Record where these arrays are stored, so that changes are noticed.

        Raises
        ------
        ValueError
            An array is impossible: its chunks take more memory than it could need.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Check that the storage has not changed since it was first opened in any process.

        Rows of another file would not match the plan and the labels.

        Raises
        ------
        FormatError
            It was replaced or written to.
        PathError
            It was removed.
        """

    @abstractmethod
    def stored(self, name: str) -> Any:
        """Return an array or group.

        Raises
        ------
        FormatError
            It is a link to nothing, or its values lie where cellfeed does not read them.
        KeyError
            There is no such element.
        """

    @abstractmethod
    def stored_bytes(self, name: str) -> int | None:
        """Return the compressed size of an array in bytes; None if unknown."""

    def bytes_there(self, name: str) -> int | None:
        """Return about how many bytes an array has in storage, which may take a request.

        None if unknown.
        """
        return self.stored_bytes(name)

    def check_texts(self, name: str) -> None:
        """Check the lengths of the texts of an array, for which memory is allocated.

        Raises
        ------
        FormatError
            One is impossible.
        """

    @abstractmethod
    def n_absent(self, name: str) -> int:
        """Return how many chunks of an array, or their files, there are not; 0 if unknown."""

    @abstractmethod
    def codec(self, name: str) -> str:
        """Return the compression of an array, such as "gzip 4", "zstd, sharded" or "none"."""

    @abstractmethod
    def has_checksums(self, name: str) -> bool:
        """Return whether each chunk of an array has a checksum."""

    @abstractmethod
    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only the format's own library can read an array; None if cellfeed can."""

    @abstractmethod
    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array, or their files, are missing.

        Libraries read their elements as zeros, which may be correct, since chunks of zeros need not
        be written.
        """

    @abstractmethod
    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason.

        Parameters
        ----------
        name
            Path of the array in the group.
        lost_is_zero
            See `ChunkedArray`.
        """

    def are_same(self, name: str, other: str) -> bool:  # noqa: ARG002 - unless it is known to be
        """Return whether two arrays are one, by links; False if it is unknown."""
        return False

    def recorded(self, what: str, compute: Callable[[], Computed]) -> Computed | Tables:  # noqa: ARG002 - for subclasses
        """Return what was computed from a single file when it was first opened, or compute it.

        Parameters
        ----------
        what, compute
            See `FileRecord.get`.
        """
        return compute()

    @abstractmethod
    def table_cache(self, name: str) -> CachedTables:
        """Return the cache for tables of an array between openings."""

    def prefetch(self, names: Sequence[str]) -> None:
        """Prefetch arrays and tables that are about to be read completely, if worthwhile."""

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the file; None if it is unknown, or there are many files."""
        return None

    def n_bytes(self) -> int | None:
        """Return the size of a file on a server in bytes; None for other storages."""
        return None

    def read(self, name: str) -> Any:
        """Return an element as anndata reads it."""
        return read_element(self.stored(name))

    def read_oldest_frame(self, name: str) -> pd.DataFrame:
        """Read a table in the format of anndata before 0.7, if it is local HDF5.

        Raises
        ------
        FormatError
            It is not.
        """
        msg = f"{self.location}: `{name}` is in the format of anndata before 0.7"
        raise FormatError(f"{msg}; download the file, or write it again with anndata")


class FileSource(Source):
    """Base class of sources whose cells lie in one file or store.

    Parameters
    ----------
    file
        The file or store.
    """

    def __init__(self, file: AnnDataFile) -> None:
        self._file = file
        self.location = file.location

    def file_bytes(self) -> int:
        """Return the size of its file in bytes, local or remote."""
        n_bytes = self._file.n_bytes()
        return super().file_bytes() if n_bytes is None else n_bytes

    def version(self) -> str | None:
        """Return a digest that changes when its file is replaced; None if there is none."""
        found = self._file.identity()
        linked = [(str(each), each.stat()) for each in self.linked_files()]
        if found is None or not linked:
            return None if found is None else found.digest
        return digest_of(found.digest, lasting_identity(linked).digest)

    def linked_files(self) -> Sequence[Path]:
        """Return local files elsewhere to which its elements are linked."""
        return self._file.linked_files

    @abc.abstractmethod
    def stored_elements(self) -> dict[str, str]:
        """Return the encoding of each element in the file, also of those that were not opened."""
