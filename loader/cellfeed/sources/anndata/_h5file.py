"""An HDF5 file of AnnData, local or remote: its arrays, and the locations of their chunks.

Links are followed here, so that HDF5 opens no pipe and no other file than the one that is watched.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import math
import os
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil  # the lock that all of h5py takes: pages come under it
from numpy.typing import NDArray

from cellfeed import decode
from cellfeed._errors import CellfeedError, FormatError, PathError
from cellfeed._lazy import ad, pd
from cellfeed.bytes import (
    ByteStore,
    LastingIdentity,
    Location,
    identity,
    lasting_identity,
    replaced,
    require_file,
)
from cellfeed.bytes._remote import PagedFile, RemoteObjects, Version, paged_file
from cellfeed.bytes._store import OpenFile
from cellfeed.bytes._tables import CachedTables, Computed, FileRecord, Tables
from cellfeed.decode._array import check_grid, chunk_grid
from cellfeed.decode._hdf5 import (
    hdf5_array,
    hdf5_slow_read,
    hdf5_tables,
    longest_text,
)
from cellfeed.machine import share_of_descriptors
from cellfeed.sources._registry import other_format
from cellfeed.sources._source import WatchedFiles
from cellfeed.sources.anndata._file import AnnDataFile, check_sizes, own_members

_DEEPEST = 8  # groups in a table
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

    def __init__(self, location: Location, lasting_name: str) -> None:
        super().__init__(location, lasting_name)
        # Of elements that this process has checked: another file, if they lie there, and the path.
        self._resolved = dict[str, tuple[H5File | None, str]]()
        self._record = FileRecord(lasting_name)
        # Elements that one computation asks for several times. Later, they are closed: HDF5 keeps
        # the last chunks of those that are open.
        self._held: dict[str, Any] | None = None

    def _open(self) -> h5py.File:
        self._resolved.clear()
        return self._open_file()

    @abstractmethod
    def _open_file(self) -> h5py.File:
        """Open the file."""

    @property
    @abstractmethod
    def byte_store(self) -> ByteStore:
        """The byte store of chunks."""

    def _resolve(self, name: str, n_links: int = 0) -> tuple[H5File, str]:
        """Return the file in which an element lies, and its path there without links.

        The path may end where the element is missing.

        Raises
        ------
        FormatError
            A link leads to nothing, to itself, or into a file that cellfeed does not read.
        """
        file, parts = self(), [part for part in name.split("/") if part]
        for k in range(len(parts)):
            link = file.get("/".join(parts[: k + 1]), getlink=True)
            if not isinstance(link, h5py.SoftLink | h5py.ExternalLink):
                continue
            is_inside = isinstance(link, h5py.SoftLink)
            of = "" if is_inside else f" of {link.filename!r}"
            what = f"{self.location}: `{'/'.join(parts)}` is a link to `{link.path}`{of}"
            start = parts[:k] if is_inside and not link.path.startswith("/") else []
            if n_links < _MOST_LINKS:
                there = self if is_inside else self._linked_file(link.filename, what)
                target = "/".join([*start, link.path])
                where, path = there._resolve(target, n_links + 1)  # noqa: SLF001 - of this class
                if not path or path in where():
                    rest = "/".join([path, *parts[k + 1 :]])
                    return where._resolve(rest, n_links + 1)  # noqa: SLF001 - of this class
            raise FormatError(f"{what}, which cannot be opened; put back what it leads to")
        return self, "/".join(parts)

    @abstractmethod
    def _linked_file(self, name: str, what: str) -> H5File:
        """Return another file into which a link leads.

        Parameters
        ----------
        name
            Its path from the folder of this file.
        what
            Which link it is, for messages.

        Raises
        ------
        FormatError
            It is not read.
        """

    def stored(self, name: str) -> Any:
        """Return an array or group, which may lie in another file; see `AnnDataFile`."""
        held = self._held
        if held is not None and name in held:
            return held[name]
        file = self()
        is_new = name not in self._resolved
        if is_new:
            where, path = self._resolve(name)
            self._resolved[name] = None if where is self else where, path
        other, path = self._resolved[name]
        found = file[path or "/"] if other is None else other.stored(path)
        if is_new and other is None:
            # Not by `h5o.get_info`, which follows the index of chunks, also one that never ends.
            is_here = h5py.h5f.get_name(found.id) == h5py.h5f.get_name(file.id)
            is_array = isinstance(found, h5py.Dataset)
            if not is_here or (is_array and (found.is_virtual or found.external)):
                del self._resolved[name]
                raise self._elsewhere(name)
        if held is not None:
            held[name] = found
        return found

    def _elsewhere(self, name: str) -> FormatError:
        msg = f"{self.location}: `{name}` is virtual, or has its values in another file"
        remedy = "write one file with all values: `anndata.read_h5ad(path).write_h5ad(copy)`"
        return FormatError(f"{msg}; {remedy}")

    def are_same(self, name: str, other: str) -> bool:
        """Return whether two arrays are one object of HDF5."""
        return bool(self.stored(name) == self.stored(other))

    def _examine_all(self, name: str, depth: int = 0) -> None:
        """Check that HDF5 finds in this file all that it reads with a group."""
        found = self.stored(name)
        if self._resolved[name][0] is not None:
            raise self._elsewhere(name)
        if isinstance(found, h5py.Group):
            if depth == _DEEPEST:
                msg = f"{self.location}: `{name}` is nested too deeply; write the file again"
                raise FormatError(msg)
            for each in found:
                self._examine_all(f"{name}/{each}", depth + 1)

    def stored_bytes(self, name: str) -> int:
        """Return the size of an array's elements in the file, in bytes."""
        stored = self.stored(name)
        return min(int(stored.id.get_storage_size()), int(stored.file.id.get_filesize()))

    def slow_read(self, name: str) -> decode.SlowRead | None:
        """Return why only HDF5 can read an array; None if cellfeed can."""
        return hdf5_slow_read(self.stored(name))

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array were never written; 0 if they are other numbers."""
        stored = self.stored(name)
        is_filled = stored.dtype.kind in "biuf" and stored.fillvalue != 0
        if stored.chunks is None or not stored.size or is_filled:
            return 0
        n_chunks = math.prod(chunk_grid(stored.shape, stored.chunks))
        return n_chunks - int(stored.id.get_num_chunks())

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> decode.ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason."""
        if self.linked_files:
            where, path = self._resolve(name)
            if where is not self:
                return where.chunked_array(path, lost_is_zero=lost_is_zero)
        tables = self.recorded(f"chunks of {name}", lambda: self._tables_of(name))
        if tables is None:
            return None
        return hdf5_array(tables, name, self.byte_store, lost_is_zero=lost_is_zero)

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
        """Return the cache for tables of an array between openings."""
        where, path = self._resolve(name)
        return CachedTables(where.lasting_name, path, where.identity)

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the location of the file."""
        return self.location

    def watch(self, names: Sequence[str]) -> None:
        """Check that these arrays are possible; the file that contains them is watched."""
        for name in names:
            stored = self.stored(name)
            if stored.chunks is not None:
                check_grid(stored.shape, stored.chunks, stored.dtype.itemsize)


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
        super().__init__(location, str(location))
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

    def _version_of(self, file: int) -> Version:  # noqa: ARG002 - there is one
        if self._version is None:  # without opening the file, of which all may be recorded
            self._version = paged_file(self.location).version
        return self._version

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the object; None if its server does not state versions."""
        return self._objects.identity()

    @property
    def byte_store(self) -> RemoteObjects:
        """The byte store of chunks."""
        return self._objects

    def _linked_file(self, name: str, what: str) -> H5File:  # noqa: ARG002 - for messages
        """Refuse links into other files; see `H5File`."""
        msg = f"{what}, another file, which is not looked for on servers; download both files"
        raise FormatError(f"{msg}, or write one with all values")

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


# A local file, whose chunks compiled threads read through its descriptor.


class LocalH5File(H5File, ByteStore):
    """A file whose size and modification time are watched, with those of files that it links to.

    HDF5 has few files open at a time; see `_close_earlier`. Chunks are read through a descriptor of
    its own, or by path where there are too many files for that.

    Parameters
    ----------
    path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self._absolute = path.absolute()  # it stays the same file where the folder changes
        self._watched = WatchedFiles()
        super().__init__(Location.of(path), str(self._absolute))
        self._opened_as: LastingIdentity | None = None  # the file as this process opened it
        self._linked = dict[Path, LocalH5File]()  # by absolute path
        self._handle: _Handle | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_handle": None}

    def __call__(self) -> h5py.File:
        """Return the file, open in HDF5."""
        file = self._opened if self.is_open else None
        if file is None:  # also where another thread has closed it meanwhile
            file = self._opened = self._open()
            self._process = os.getpid()
            _close_earlier(self)
        return file

    def close(self) -> None:
        """Close the file in HDF5 once nothing refers to its arrays; a call opens it again."""
        self._process, self._opened = -1, None

    @property
    def byte_store(self) -> ByteStore:
        """The byte store of chunks: this file."""
        return self

    def _open_file(self) -> h5py.File:
        file = _open(self.location, self._absolute)
        if _is_of_earlier(file):
            file.close()
            gc.collect()  # an error of Python 3.12 may keep a collection until then
            file = _open(self.location, self._absolute)
            if _is_of_earlier(file):
                msg = (
                    f"{self.location}: was written to while this process has it open, and HDF5 "
                    "still has its earlier contents; delete all collections and datasets of it, "
                    "or restart Python, and open it again"
                )
                raise FormatError(msg)
        found = _state_of(file)
        with phil:
            _opened.append((weakref.ref(file), found))
        self._opened_as = lasting_identity([("", found)])
        self._watched.see(self._absolute, found, self.location)
        return file

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the file; None if it was written to since HDF5 opened it.

        HDF5 may still have earlier contents in memory.
        """
        if not self.is_open:
            try:
                at_path = self._absolute.stat()
            except OSError:
                return None  # which opening will report
            self._watched.see(self._absolute, at_path, self.location)
            return lasting_identity([("", at_path)])
        found = lasting_identity([("", _state_of(self()))])
        is_same = self._opened_as is not None and self._opened_as.digest == found.digest
        return self._opened_as if is_same else None

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return a file descriptor, or the address of the path; see `ByteStore`."""
        if self._handle is None or self._handle.process != os.getpid():
            self._handle = _Handle(self._absolute)
            if self._handle.file is not None:
                found = os.fstat(self._handle.file.descriptor)
                self._watched.see(self._absolute, found, self.location)
        return np.full(len(files), self._handle.number, np.int64), self._handle

    def check_files(self, files: NDArray[np.int64]) -> None:  # noqa: ARG002 - there is one
        """Check this file; see `ByteStore`."""
        self._watched.check()

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of the file in bytes, -1 if it is missing."""
        try:
            n_bytes = self._absolute.stat().st_size
        except FileNotFoundError:
            n_bytes = -1
        return np.full(len(files), n_bytes, np.int64)

    def check_unchanged(self) -> None:
        """Check that the path still leads to the file that was first opened; see `AnnDataFile`."""
        self._watched.check()
        for each in self._linked.values():
            each.check_unchanged()

    @property
    def linked_files(self) -> Sequence[Path]:  # type: ignore[override]
        """The files that its elements are linked to, as far as they have been read."""
        files = self._linked.items()
        return tuple(path for own, file in files for path in (own, *file.linked_files))

    def _linked_file(self, name: str, what: str) -> H5File:
        """Return a file by its path from the folder of this one; see `H5File`."""
        path = self._absolute.parent / name
        if not path.is_file():  # HDF5 would wait for a pipe
            raise FormatError(f"{what}, which is no file; put back what it leads to")
        return self._linked.setdefault(path, LocalH5File(path))

    def read_oldest_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` through anndata, which needs the whole file."""
        for each in self():
            self._examine_all(each)
            if each not in ("X", "raw.X"):  # which stay in the file
                check_sizes(self, each)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file is old is no news to its reader
            adata = ad.read_h5ad(self._absolute, backed="r")
        try:
            table: pd.DataFrame = adata.raw.var if name.startswith("raw") else getattr(adata, name)
            return table
        finally:
            adata.file.close()

    def check_texts(self, name: str) -> None:
        """Check that no text of an array is longer than its file; see `AnnDataFile`."""
        stored = self.stored(name)
        descriptor = stored.file.id.get_vfd_handle()
        n_bytes = longest_text(stored, lambda offset, n: os.pread(descriptor, n, offset))
        if n_bytes > int(stored.file.id.get_filesize()):
            msg = f"{self.location}: `{name}` has a text of {n_bytes:,} bytes, more than its file"
            raise FormatError(f"{msg}; copy or download it again")


class _Handle:
    """What compiled threads of this process read a file by: a descriptor, or the path."""

    def __init__(self, path: Path) -> None:
        self.process = os.getpid()
        self.file: OpenFile | None = None
        if OpenFile.n_more():
            with contextlib.suppress(OSError):  # which is reported when the path is read
                self.file = OpenFile(path)
        self._path = np.frombuffer(os.fsencode(path) + b"\0", np.uint8)
        self.number = -self._path.ctypes.data if self.file is None else self.file.descriptor


_MOST_IN_HDF5 = 64
_SHARE_OF_HDF5 = 8  # of the descriptors that are left; others belong to chunks and tables
# Files that HDF5 has open, in the order of opening; without callbacks, in which Ctrl-C could be
# lost. Of two threads that open files at the same time, one may miss that of the other.
_latest: list[weakref.ref[LocalH5File]] = []


def _close_earlier(file: LocalH5File) -> None:
    """Close the files of this process that have been open for longest, if there are too many.

    Each takes a descriptor and 0.6 MB of memory. It is opened again when it is needed.
    """
    others = [each for known in _latest if (each := known()) not in (None, file) and each.is_open]
    n_open = len(others) + 1
    most = max(1, min(_MOST_IN_HDF5, share_of_descriptors(_SHARE_OF_HDF5, n_open)))
    _latest[:] = [weakref.ref(each) for each in (*others, file)][-most:]
    for each in others[: max(0, n_open - most)]:
        each.close()


# As long as one handle is open, HDF5 opens no other for the same file, and what it has read of the
# file before stays in memory. These are the files that are open, with their states at opening.
_opened: list[tuple[weakref.ref[h5py.File], os.stat_result]] = []


def _is_of_earlier(file: h5py.File) -> bool:
    """Return whether a handle is of a file that has changed since another was opened."""
    with phil:
        _opened[:] = [each for each in _opened if each[0]()]  # neither gone nor closed
    now = _state_of(file)
    return any(
        os.path.samestat(now, before) and identity(now) != identity(before) for _, before in _opened
    )


def _state_of(file: h5py.File) -> os.stat_result:
    return os.fstat(file.id.get_vfd_handle())


def _open(path: Location, absolute: Path) -> h5py.File:
    require_file(absolute, path)
    try:
        # HDF5's default locking: another would clash with a handle that the user has open.
        return h5py.File(absolute, "r")
    except PermissionError as error:
        msg = f"{path}: permission to read is denied; check its permissions"
        raise PathError(msg) from error
    except OSError as error:
        if error.errno == errno.EMFILE:
            msg = f"{path}: too many files are open; allow more, for example with `ulimit -n 65536`"
            raise PathError(msg) from error
        if "unable to lock file" in str(error):
            remedy = (
                "another process has it open for writing; close it there"
                if error.errno == errno.EAGAIN
                else "its file system has no locks; set HDF5_USE_FILE_LOCKING=FALSE"
            )
            raise PathError(f"{path}: cannot be locked: {remedy}") from error
        if "truncated file" in str(error):
            msg = f"{path}: the file is truncated; copy or download it again"
        elif not h5py.is_hdf5(absolute):
            what = other_format(path) or "not an HDF5 file, so not .h5ad; give AnnData files"
            msg = f"{path}: is {what}"
        else:
            msg = f"{path}: cannot be opened as HDF5 ({error}); copy or download it again"
        raise FormatError(msg) from error
