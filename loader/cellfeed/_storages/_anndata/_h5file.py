"""An HDF5 file of AnnData, local or remote: its arrays, and the locations of their chunks."""

from __future__ import annotations

import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import h5py

from cellfeed._bytes import ByteStore, Location
from cellfeed._bytes._tables import CachedTables
from cellfeed._decode import (
    ChunkedArray,
    SlowRead,
    check_grid,
    chunk_grid,
    hdf5_array,
    hdf5_codec,
    hdf5_slow_read,
)
from cellfeed._errors import FormatError
from cellfeed._lazy import pd
from cellfeed._storages._anndata._attributes import read_element

# The interface to file formats; h5ad and zarr differ only in its implementation.


class AnnDataFile(Protocol):
    """A stored AnnData object, opened lazily in each process, and never for writing.

    h5py and zarr have groups and arrays with the same interface, so these are not wrapped.
    """

    library: str
    """The library that reads arrays that cellfeed does not decode: ``"h5py"`` or ``"zarr"``."""

    @property
    def location(self) -> Location:
        """The file, folder or URL."""
        ...

    def __call__(self) -> Any:
        """Return the group that contains ``X``, ``obs`` and ``var``."""
        ...

    def watch(self, names: Sequence[str]) -> None:
        """Record where these arrays are stored, so that changes are noticed.

        Raises
        ------
        ValueError
            An array is impossible: its chunks take more memory than it could need.
        """
        ...

    def check_unchanged(self) -> None:
        """Check that the storage has not changed since it was first opened in any process.

        Raises
        ------
        FormatError
            It was replaced or written to.
        """
        ...

    def bring(self, names: Sequence[str]) -> None:
        """Prefetch arrays and tables that are about to be read completely, if worthwhile."""
        ...

    def stored(self, name: str) -> Any:
        """Return an array or group; other files that it lies in, or refers to, are watched.

        Raises
        ------
        FormatError
            It refers to a file that is missing, or that cellfeed cannot follow.
        KeyError
            There is no such element.
        """
        ...

    def read(self, name: str) -> Any:
        """Return an element as anndata reads it."""
        ...

    def stored_bytes(self, name: str) -> int:
        """Return the compressed size of an array's elements in storage, in bytes."""
        ...

    def codec(self, name: str) -> str:
        """Return the compression of an array, as text."""
        ...

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only the format's own library can read an array; None if cellfeed can."""
        ...

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array, or their files, are missing.

        Libraries read their elements as zeros, which may be correct, since chunks of zeros need not
        be written.
        """
        ...

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason.

        Parameters
        ----------
        name
            Path of the array in the group.
        lost_is_zero
            See `ChunkedArray`.
        """
        ...

    def kept_tables(self, name: str) -> CachedTables:
        """Return the cache for tables of an array between openings."""
        ...

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a format that anndata no longer writes."""
        ...


_DEEPEST = 8  # groups in a table
_UNOPENED = OSError, RuntimeError, ValueError  # of a link that leads to itself, for example
_MOST_LINKS = 16  # that HDF5 follows, too


class H5File(ByteStore):
    """A read-only HDF5 file, opened lazily, never shared between processes.

    HDF5 handles do not survive a fork, and cannot be pickled. The handle is therefore stored
    with the id of the process that opened it, and left out of pickles.

    Parameters
    ----------
    location
        The file.
    """

    library = "h5py"

    def __init__(self, location: Location) -> None:
        self.location = location
        self._file: h5py.File | None = None
        self._process = -1
        self._examined = set[str]()

    def __call__(self) -> h5py.File:
        """Return the open file.

        Raises
        ------
        PathError
            There is no such file, or it may not be read.
        FormatError
            The file is truncated, is not HDF5, or was replaced since it was first opened.
        """
        if self._file is None or self._process != os.getpid():
            self._examined = set()
            self._file, self._process = self._open(), os.getpid()
        return self._file

    @abstractmethod
    def _open(self) -> h5py.File:
        """Open the file."""

    @property
    @abstractmethod
    def lasting_name(self) -> str:
        """Key under which tables of the file are cached."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Check that this is still the file that was first opened in any process.

        Rows of another file would not match the plan and the labels.

        Raises
        ------
        FormatError
            The file was replaced or written to.
        """

    @abstractmethod
    def read_oldest_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in the format of anndata before 0.7."""

    def bring(self, names: Sequence[str]) -> None:
        """Do nothing, unless the file is remote; see `AnnDataFile`."""

    def stored(self, name: str) -> Any:
        """Return an array or group, which may lie in another file; see `AnnDataFile`."""
        try:
            found = self()[name]
        except (KeyError, *_UNOPENED):
            link = broken_link(self(), name)
            if link is None:
                raise
            of = f" of {link.filename!r}" if isinstance(link, h5py.ExternalLink) else ""
            msg = (
                f"{self.location}: `{name}` is a link to `{link.path}`{of}, which cannot be "
                "opened; put back what it leads to"
            )
            raise FormatError(msg) from None
        if name not in self._examined:
            self._examine(found, name)
            self._examined.add(name)
        return found

    @abstractmethod
    def _examine(self, found: Any, name: str) -> None:
        """Watch the other files that an array or group lies in or takes its values from.

        Raises
        ------
        FormatError
            It cannot be read from there.
        """

    def read(self, name: str) -> Any:
        """Return an element as anndata reads it."""
        self.bring([name])
        self._examine_all(name)
        return read_element(self.stored(name))

    def _examine_all(self, name: str, depth: int = 0) -> None:
        found = self.stored(name)
        if isinstance(found, h5py.Group):
            if depth == _DEEPEST:
                msg = f"{self.location}: `{name}` is nested too deeply; write the file again"
                raise FormatError(msg)
            for each in found:
                self._examine_all(f"{name}/{each}", depth + 1)

    def stored_bytes(self, name: str) -> int:
        """Return the size of an array's elements in the file, in bytes."""
        return int(self.stored(name).id.get_storage_size())

    def codec(self, name: str) -> str:
        """Return the compression of an array, such as "gzip 4" or "none"."""
        return hdf5_codec(self.stored(name))

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only HDF5 can read an array; None if cellfeed can."""
        return hdf5_slow_read(self.stored(name))

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array were never written; 0 if they are not zeros."""
        return lost_chunks(self.stored(name))

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason."""
        dataset, (file, _) = self.stored(name), self._where(name)
        return hdf5_array(
            dataset, name, file.byte_store(), self.kept_tables(name), lost_is_zero=lost_is_zero
        )

    def byte_store(self) -> ByteStore:
        """Return the byte store of chunks."""
        return self

    def kept_tables(self, name: str) -> CachedTables:
        """Return the cache for tables of an array between openings."""
        file, key = self._where(name)
        return CachedTables(file.lasting_name, key, file.identity)

    def _where(self, name: str) -> tuple[H5File, str]:
        """Return the file in which an array lies, and what identifies it there."""
        return self, name

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a format that anndata no longer writes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file is old is no news to its reader
            if "mod" in self():  # MuData, which came when anndata wrote tables as groups
                frame: pd.DataFrame = self.read(name)
                return frame
            return self.read_oldest_frame(name)

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the location of the file."""
        return self.location

    def watch(self, names: Sequence[str]) -> None:
        """Check that these arrays are possible; the file that contains them is watched."""
        for name in names:
            stored = self.stored(name)
            if stored.chunks is not None:
                check_grid(stored.shape, stored.chunks, stored.dtype.itemsize)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_process": -1}


def lost_chunks(dataset: h5py.Dataset) -> int:
    """Return how many chunks of an array were never written; 0 if they are not zeros."""
    if dataset.chunks is None or not dataset.size or dataset.fillvalue != 0:
        return 0
    n_chunks = math.prod(chunk_grid(dataset.shape, dataset.chunks))
    return n_chunks - int(dataset.id.get_num_chunks())


def broken_link(group: h5py.Group, name: str) -> h5py.ExternalLink | h5py.SoftLink | None:
    """Return the first link of a path that leads to nothing; None if the path just ends."""
    for part in filter(None, name.split("/")):
        link = group.get(part, getlink=True)
        try:
            group = group[part]
        except (KeyError, *_UNOPENED):
            return None if isinstance(link, h5py.HardLink) else link
    return None


def external_link(group: h5py.Group, name: str, depth: int = 0) -> h5py.ExternalLink | None:
    """Return the first link of a path into another file; None if all of it is in this one."""
    parts = [part for part in name.split("/") if part]
    for k, part in enumerate(parts):
        link = group.get(part, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            return link
        if isinstance(link, h5py.SoftLink) and depth < _MOST_LINKS:
            start = group.file if link.path.startswith("/") else group
            return external_link(start, "/".join([link.path, *parts[k + 1 :]]), depth + 1)
        found = group.get(part)
        if not isinstance(found, h5py.Group):
            break
        group = found
    return None
