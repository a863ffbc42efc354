"""An HDF5 file of AnnData, local or remote: its arrays, and the locations of their chunks."""

from __future__ import annotations

import atexit
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil  # the lock that all of h5py takes: pages come under it

from cellfeed import decode
from cellfeed._errors import CellfeedError, FormatError
from cellfeed._lazy import pd
from cellfeed.bytes import ByteStore, LastingIdentity, Location, replaced
from cellfeed.bytes._remote import PagedFile, RemoteObjects, Version, paged_file
from cellfeed.bytes._tables import CachedTables, Computed, FileRecord, Tables
from cellfeed.decode._array import check_grid, chunk_grid
from cellfeed.decode._hdf5 import (
    hdf5_array,
    hdf5_codec,
    hdf5_has_checksums,
    hdf5_slow_read,
    hdf5_tables,
)
from cellfeed.sources._anndata._file import AnnDataFile

_DEEPEST = 8  # groups in a table
_UNOPENED = OSError, RuntimeError, ValueError  # of a link that leads to itself, for example
_MOST_LINKS = 16  # that HDF5 follows, too


class H5File(AnnDataFile):
    """A read-only HDF5 file; calling it returns the open `h5py.File`.

    Raises
    ------
    PathError
        When it is called: there is no such file, or it may not be read.
    FormatError
        The file is truncated, is not HDF5, or was replaced since it was first opened.
    """

    library = "h5py"

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._examined = set[str]()  # elements whose other files are watched by this process
        self._record = FileRecord(self.lasting_name)
        # Elements that one computation asks for several times. Later, they are closed: HDF5 keeps
        # the last chunks of those that are open.
        self._held: dict[str, Any] | None = None

    def _open(self) -> h5py.File:
        self._examined.clear()
        return self._open_file()

    @abstractmethod
    def _open_file(self) -> h5py.File:
        """Open the file."""

    @property
    @abstractmethod
    def lasting_name(self) -> str:
        """Key under which tables of the file are cached."""

    @property
    @abstractmethod
    def byte_store(self) -> ByteStore:
        """The byte store of chunks."""

    @abstractmethod
    def read_oldest_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in the format of anndata before 0.7."""

    def stored(self, name: str) -> Any:
        """See `AnnDataFile`; it may lie in another file."""
        held = self._held
        if held is not None and name in held:
            return held[name]
        file = self()
        link = None if name in self._examined else external_link(file, name)
        path = None if link is None else self._follow(link, name)
        try:
            found = file[name]
        except (KeyError, *_UNOPENED):
            broken = broken_link(file, name)
            if broken is None:
                raise
            of = f" of {broken.filename!r}" if isinstance(broken, h5py.ExternalLink) else ""
            msg = f"{self.location}: `{name}` is a link to `{broken.path}`{of}, which cannot be"
            raise FormatError(f"{msg} opened; put back what it leads to") from None
        if name not in self._examined:
            self._examine(found, name, path)
            self._examined.add(name)
        if held is not None:
            held[name] = found
        return found

    def are_same(self, name: str, other: str) -> bool:
        """Return whether two arrays are one object of HDF5."""
        return bool(self.stored(name) == self.stored(other))

    @abstractmethod
    def _follow(self, link: h5py.ExternalLink, name: str) -> Path | None:
        """Return the file to which the link of an element leads, before HDF5 opens that.

        None if it is nowhere.

        Raises
        ------
        FormatError
            HDF5 must not open what is there.
        """

    @abstractmethod
    def _examine(self, found: Any, name: str, path: Path | None) -> None:
        """Watch the other files that an array or group lies in or takes its values from.

        Parameters
        ----------
        found, name
            The array or group, and its path.
        path
            The file in which it lies, as `_follow` returned it; None for this one.

        Raises
        ------
        FormatError
            It cannot be read from there.
        """

    def read(self, name: str) -> Any:
        """Return an element as anndata reads it."""
        self.prefetch([name])
        self._examine_all(name)
        return super().read(name)

    def _examine_all(self, name: str, depth: int = 0) -> None:
        found = self.stored(name)
        if isinstance(found, h5py.Group):
            if depth == _DEEPEST:
                msg = f"{self.location}: `{name}` is nested too deeply; write the file again"
                raise FormatError(msg)
            for each in found:
                self._examine_all(f"{name}/{each}", depth + 1)

    def stored_bytes(self, name: str) -> int | None:
        """Return the size of an array's elements in the file, in bytes; None in other files."""
        stored = self.stored(name)
        if stored.is_virtual or stored.external:
            return None
        return min(int(stored.id.get_storage_size()), int(stored.file.id.get_filesize()))

    def n_absent(self, name: str) -> int:
        """Return how many chunks of an array were never written."""
        return absent_chunks(self.stored(name))

    def codec(self, name: str) -> str:
        """Return the compression of an array, such as "gzip 4" or "none"."""
        return hdf5_codec(self.stored(name))

    def has_checksums(self, name: str) -> bool:
        """Return whether each chunk of an array has a checksum."""
        return hdf5_has_checksums(self.stored(name))

    def slow_read(self, name: str) -> decode.SlowRead | None:
        """Return why only HDF5 can read an array; None if cellfeed can."""
        return hdf5_slow_read(self.stored(name))

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array were never written; 0 if they are not zeros."""
        return lost_chunks(self.stored(name))

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> decode.ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason."""
        tables = self.recorded(f"chunks of {name}", lambda: self._tables_of(name))
        if tables is None:
            return None
        file = self._where(name)[0] if self.linked_files else self
        return hdf5_array(tables, name, file.byte_store, lost_is_zero=lost_is_zero)

    def _tables_of(self, name: str) -> Tables | None:
        return hdf5_tables(self.stored(name), lambda: self.table_cache(name))

    def recorded(self, what: str, compute: Callable[[], Computed]) -> Computed | Tables:
        """Return what is recorded of the file, which then need not be opened; see `AnnDataFile`.

        Nothing is recorded of files with links into others, which have identities of their own.
        """
        self._held = {}
        try:
            return self._record.get(
                what, compute, lambda: None if self.linked_files else self.identity()
            )
        finally:
            self._held = None

    def table_cache(self, name: str) -> CachedTables:
        """Return the cache for tables of an array between openings.

        Nothing is cached of values that lie in several files, only one of which is identified.
        """
        file, key = self._where(name)
        return CachedTables(
            file.lasting_name, key, file.identity if self._is_in_one_file(name) else lambda: None
        )

    def _is_in_one_file(self, name: str) -> bool:
        found = self.stored(name)
        if isinstance(found, h5py.Dataset):
            return not (found.is_virtual or found.external)
        members = [f"{name}/{each}" for each in found]
        return all(
            self._where(each)[0] is self._where(name)[0] and self._is_in_one_file(each)
            for each in members
        )

    def _where(self, name: str) -> tuple[H5File, str]:
        """Return the file in which an array lies, and what identifies it there."""
        return self, name

    def _read_old_frame(self, name: str) -> pd.DataFrame:
        self._examine_all(name)
        # MuData came when anndata wrote tables as groups.
        return super()._read_old_frame(name) if "mod" in self() else self.read_oldest_frame(name)

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the location of the file."""
        return self.location

    def watch(self, names: Sequence[str]) -> None:
        """Check that these arrays are possible; the file that contains them is watched."""
        for name in names:
            stored = self.stored(name)
            if stored.chunks is not None:
                check_grid(stored.shape, stored.chunks, stored.dtype.itemsize)


def lost_chunks(dataset: h5py.Dataset) -> int:
    """Return how many chunks of an array were never written; 0 if they are not zeros."""
    return 0 if dataset.fillvalue != 0 else absent_chunks(dataset)


def absent_chunks(dataset: h5py.Dataset) -> int:
    """Return how many chunks of an array were never written."""
    if dataset.chunks is None or not dataset.size:
        return 0
    n_chunks = math.prod(chunk_grid(dataset.shape, dataset.chunks))
    return n_chunks - int(dataset.id.get_num_chunks())


def broken_link(group: h5py.Group, name: str) -> h5py.ExternalLink | h5py.SoftLink | None:
    """Return the first link of a path that leads to nothing; None if the path just ends."""
    for part in filter(None, name.split("/")):
        if not isinstance(group, h5py.Group):
            return None
        link = group.get(part, getlink=True)
        try:
            group = group[part]
        except (KeyError, *_UNOPENED):
            return None if isinstance(link, h5py.HardLink) else link
    return None


def external_link(group: h5py.Group, name: str, depth: int = 0) -> h5py.ExternalLink | None:
    """Return the first link of a path into another file, with the rest of the path there.

    None if all of it is in this one.
    """
    parts = [part for part in name.split("/") if part]
    for k in range(len(parts)):
        try:
            link = group.get("/".join(parts[: k + 1]), getlink=True)
        except _UNOPENED:
            return None
        rest = parts[k + 1 :]
        if isinstance(link, h5py.ExternalLink):
            return h5py.ExternalLink(link.filename, "/".join([link.path, *rest]))
        if isinstance(link, h5py.SoftLink) and depth < _MOST_LINKS:
            parent = group["/".join(parts[:k])] if k else group
            start = group.file if link.path.startswith("/") else parent
            return external_link(start, "/".join([link.path, *rest]), depth + 1)
    return None


def own_members(group: Any) -> dict[str, Any]:
    """Return the arrays and groups in a group of HDF5 or zarr, without those in other files."""
    if isinstance(group, h5py.Group):
        names = [name for name in group if external_link(group, name) is None]
    else:
        names = list(group)
    found = {name: group.get(name) for name in names}
    return {name: each for name, each in found.items() if each is not None}


# A file on a web server or in an object store, unconverted.

_MOST_PREFETCHED = 1 << 27  # bytes of an array that is read as a whole
_OPEN = weakref.WeakSet[h5py.File]()


@atexit.register
def _close() -> None:
    """Close open files while Python still runs, since HDF5 would call Python after its exit."""
    with phil:  # a thread that is stopped while it has this would keep it; it gives up soon
        for file in list(_OPEN):
            file.close()


class RemoteH5File(H5File):
    """A file whose metadata HDF5 reads from cached pages, and whose chunks `RemoteObjects` reads.

    Each answer of the server states the version of the object, and versions other than the one that
    was first opened are refused.

    Parameters
    ----------
    location
        The object.
    """

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._version: Version | None = None
        self._objects = RemoteObjects(self.location_of, self._version_of)
        self._pages: PagedFile | None = None

    def _open_file(self) -> h5py.File:
        version = self._version_of(0)
        self._pages = paged_file(self.location, version)
        if self._pages.version != version:
            raise replaced(self.location)
        try:
            file = h5py.File(self._pages, "r")
        except CellfeedError:
            raise
        except OSError as error:
            if "truncated file" in str(error):
                msg = f"{self.location}: the file is truncated; upload it again"
            else:
                msg = f"{self.location}: is not an HDF5 file, so not .h5ad; give AnnData files"
            raise FormatError(msg) from error
        _OPEN.add(file)
        return file

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pages": None}

    @property
    def lasting_name(self) -> str:
        return str(self.location)

    def _version_of(self, file: int) -> Version:  # noqa: ARG002 - there is one
        if self._version is None:  # without opening the file, of which all may be recorded
            self._version = paged_file(self.location).version
        return self._version

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the object; None if its server does not state versions."""
        return self._objects.identity()

    def n_bytes(self) -> int | None:
        """Return the size of the object in bytes."""
        return int(self._objects.sizes(np.zeros(1, np.int64))[0])

    @property
    def byte_store(self) -> RemoteObjects:
        """The byte store of chunks."""
        return self._objects

    def check_unchanged(self) -> None:
        """Do nothing, since each answer of the server is checked."""

    def _follow(self, link: h5py.ExternalLink, name: str) -> Path | None:
        """Refuse links into other files, for which HDF5 takes this one; see `H5File`."""
        raise self._elsewhere(name, link.filename)

    def _examine(self, found: Any, name: str, path: Path | None) -> None:  # noqa: ARG002 - there is one
        """Refuse arrays with values in other files; see `H5File`."""
        if not isinstance(found, h5py.Dataset):
            return
        for file_name, _, _ in found.external or ():
            raise self._elsewhere(name, file_name)
        for source in found.virtual_sources() if found.is_virtual else ():
            if source.file_name != ".":
                raise self._elsewhere(name, source.file_name)
            try:
                self.stored(source.dset_name)
            except KeyError:
                msg = (
                    f"`{name}` is virtual, with values of `{source.dset_name}`, which is not there"
                )
                raise FormatError(f"{self.location}: {msg}; write the file again") from None

    def _elsewhere(self, name: str, file_name: str) -> FormatError:
        msg = (
            f"{self.location}: `{name}` is in another file, {file_name!r}, which is not looked for "
            "on servers; download both files, or write one with all values"
        )
        return FormatError(msg)

    def _tables_of(self, name: str) -> Tables | None:
        # The index of chunks is fetched level by level.
        with self._listing(self.stored(name).ndim):
            return super()._tables_of(name)

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array were never written."""
        with self._listing(self.stored(name).ndim):
            return super().n_lost(name)

    def prefetch(self, names: Sequence[str]) -> None:
        """Prefetch arrays that are read completely, each with few round trips."""
        for name in names:
            element = self.stored(name)
            own = [element] if isinstance(element, h5py.Dataset) else own_members(element).values()
            for each in own:
                if isinstance(each, h5py.Dataset):
                    self._prefetch(each)

    def _prefetch(self, dataset: h5py.Dataset) -> None:
        if dataset.chunks is None or dataset.id.get_storage_size() > _MOST_PREFETCHED:
            return
        found = list[tuple[int, int]]()
        with self._listing(dataset.ndim):
            dataset.id.chunk_iter(lambda chunk: found.append((chunk.byte_offset, chunk.size)))
        if found and self._pages is not None:
            offsets, sizes = np.array(found, np.int64).T
            with phil:
                self._pages.prefetch(offsets, sizes)

    @contextmanager
    def _listing(self, n_dimensions: int) -> Iterator[None]:
        """Prepare for listing the chunks of an array."""
        if self._pages is None:
            raise AssertionError
        self._pages.index_of_chunks(n_dimensions)
        try:
            yield
        finally:
            self._pages.index_of_chunks(0)

    def read_oldest_frame(self, name: str) -> pd.DataFrame:
        """Refuse tables of anndata before 0.7, which anndata only reads from local files."""
        msg = f"{self.location}: `{name}` is in the format of anndata before 0.7"
        raise FormatError(f"{msg}; download the file, or write it again with anndata")
