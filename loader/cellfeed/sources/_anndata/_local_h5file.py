"""A local HDF5 file, whose chunks compiled threads read through its descriptor."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError, PathError
from cellfeed._lazy import ad, pd
from cellfeed.bytes import (
    NO_OPTIONS,
    ByteStore,
    LastingIdentity,
    Location,
    StorageOptions,
    identity,
    lasting_identity,
    replaced,
    require_file,
)
from cellfeed.decode._files import OpenFile
from cellfeed.decode._hdf5 import longest_text
from cellfeed.machine import share_of_descriptors
from cellfeed.sources._anndata._damage import check_sizes
from cellfeed.sources._anndata._h5file import H5File, external_link, lost_chunks
from cellfeed.sources._registry import other_format
from cellfeed.sources._source import WatchedFiles


class LocalH5File(H5File, ByteStore):
    """A file whose size and modification time are watched, with those of files that it refers to.

    Its elements may be links into other files, be virtual datasets of arrays in other files, or
    take their bytes from files that are not HDF5. HDF5 finds those; their own descriptors are used
    for the chunks of links, and HDF5 reads the others, of which it would return zeros for what is
    missing.

    HDF5 has few files open at a time; see `_LatestFiles`. Chunks are read through a descriptor of
    its own, or by path where there are too many files for that.

    Parameters
    ----------
    path
        The file.
    options
        Whether pages are dropped after each fetch.
    """

    def __init__(self, path: Path, options: StorageOptions = NO_OPTIONS) -> None:
        self._absolute = path.absolute()  # it stays the same file where the folder changes
        self._watched = WatchedFiles()  # this file, and all that it refers to
        super().__init__(Location.of(path).with_options(options))
        self._opened_as: LastingIdentity | None = None  # the file as this process opened it
        # Files into which links lead, by inode: HDF5 calls one by any path that leads to it.
        self._linked: dict[tuple[int, int], LocalH5File] = {}
        self._n_unmapped: dict[str, int] = {}  # elements of virtual datasets that are nowhere
        self._handle: _Handle | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_handle": None}

    def __call__(self) -> h5py.File:
        """Return the file, open in HDF5."""
        file = self._opened if self.is_open else None
        if file is None:  # also where another thread has closed it meanwhile
            file = self._opened = self._open()
            self._process = os.getpid()
            _latest.add(self)
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
        if _OpenedFile.is_of_earlier(file):
            file.close()
            gc.collect()  # an error of Python 3.12 may keep a collection until then
            file = _open(self.location, self._absolute)
            if _OpenedFile.is_of_earlier(file):
                msg = (
                    f"{self.location}: was written to while this process has it open, and HDF5 "
                    "still has its earlier contents; delete all collections and datasets of it, "
                    "or restart Python, and open it again"
                )
                raise FormatError(msg)
        found = _state_of(file)
        _OpenedFile.add(file, found)
        self._opened_as = lasting_identity([("", found)])
        self._watched.see(self._absolute, found, self.location)
        return file

    @property
    def lasting_name(self) -> str:
        return str(self._absolute)

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
        """Check this file, and those that it refers to; see `ByteStore`."""
        self._watched.check()

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of the file in bytes, -1 if it is missing."""
        try:
            n_bytes = self._absolute.stat().st_size
        except FileNotFoundError:
            n_bytes = -1
        return np.full(len(files), n_bytes, np.int64)

    def read_oldest_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` through anndata, which needs the whole file."""
        for each in self():
            self._examine_all(each)
            if each not in ("X", "raw.X"):  # which stay in the file
                check_sizes(self, each)
        adata = ad.read_h5ad(self._absolute, backed="r")
        try:
            table: pd.DataFrame = adata.raw.var if name.startswith("raw") else getattr(adata, name)
            return table
        finally:
            adata.file.close()

    def check_unchanged(self) -> None:
        """Check that the path still leads to the file that was first opened; see `AnnDataFile`."""
        self._watched.check()

    @property
    def linked_files(self) -> Sequence[Path]:  # type: ignore[override]
        """The files that its elements refer to, as far as they have been read."""
        return self._watched.paths[1:]

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array were never written; 0 if they are not zeros."""
        self.stored(name)
        return self._n_unmapped.get(name, 0) or super().n_lost(name)

    def check_texts(self, name: str) -> None:
        """Check that no text of an array is longer than its file; see `AnnDataFile`."""
        stored = self.stored(name)
        descriptor = stored.file.id.get_vfd_handle()
        n_bytes = longest_text(stored, lambda offset, n: os.pread(descriptor, n, offset))
        if n_bytes > int(stored.file.id.get_filesize()):
            msg = f"{self.location}: `{name}` has a text of {n_bytes:,} bytes, more than its file"
            raise FormatError(f"{msg}; copy or download it again")

    def _where(self, name: str) -> tuple[H5File, str]:
        """Return the file in which an array lies, and what identifies it there."""
        found = self.stored(name)
        there = h5py.h5o.get_info(found.id)
        is_here = there.fileno == h5py.h5o.get_info(self().id).fileno
        if is_here and not self.linked_files:
            return self, name
        file = self if is_here else self._linked[_inode_of(_state_of(found.file))]
        return file, f"at byte {there.addr}"

    def _examine(self, found: Any, name: str, path: Path | None) -> None:
        """Watch the other files of an array or group; see `H5File`."""
        if h5py.h5o.get_info(found.id).fileno != h5py.h5o.get_info(self().id).fileno:
            self._watch_linked(found.file, path, name)
        if isinstance(found, h5py.Dataset):
            self._n_unmapped[name] = self._watch_values(found, name)

    def _watch_linked(self, file: h5py.File, path: Path | None, name: str) -> None:
        if path is None:
            there = _path_of(file)
            msg = f"{self.location}: `{name}` lies in {there}, which this process has mounted there"
            raise FormatError(f"{msg}; unmount it")
        theirs = _state_of(file)
        inode = _inode_of(theirs)
        if inode not in self._linked:
            self._linked[inode] = LocalH5File(path, self.location.options)
        if _inode_of(_state_of(self._linked[inode]())) != inode:
            raise replaced(path)

    def _follow(
        self, link: h5py.ExternalLink, name: str, holder: Path | None = None
    ) -> Path | None:
        """Watch the files through which a link leads; return the last, None if one is nowhere.

        Parameters
        ----------
        link, name
            The link, and the array or group that is read, for messages.
        holder
            The file that has the link; by default, this one.
        """
        holder = holder or _path_of(self())
        path = self._find(link.filename, holder, "HDF5_EXT_PREFIX", f"`{name}` is a link into")
        if path is None:
            return None
        self._watched.see(path, path.stat())
        with h5py.File(path, "r") as file:
            following = external_link(file, link.path)
            return path if following is None else self._follow(following, name, path)

    def _find(self, name: str, holder: Path, variable: str, what: str) -> Path | None:
        """Return the file that HDF5 finds by the name in a virtual dataset or link, if any.

        Where it looks before, no file may appear.

        Parameters
        ----------
        name, holder
            Name of the file, and the file that refers to it.
        variable
            The environment variable with folders to look in first.
        what
            What refers to the file, for messages.

        Raises
        ------
        FormatError
            HDF5 would open a pipe, or a file that other processes may not find.
        """
        folder, found = holder.absolute().parent, Path(name)
        first = os.environ.get(variable, "").replace("${ORIGIN}", str(folder)).split(":")
        folders = [*(Path(each) for each in first if each), folder, Path(), holder.resolve().parent]
        beside = Path(found.name) if found.is_absolute() else found
        paths = [found] * found.is_absolute() + [each / beside for each in folders]
        for path in paths:
            if path.exists() and not (path.is_file() or path.is_dir()):
                msg = (
                    f"{self.location}: {what} {str(path)!r}, which is a pipe, a socket or a device"
                )
                raise FormatError(f"{msg}; put a file there")
            if h5py.is_hdf5(path):
                if path != beside:
                    return path
                # In other processes the current folder may be another.
                if h5py.is_hdf5(paths[-1]) and path.samefile(paths[-1]):
                    return paths[-1]
                msg = f"{self.location}: {what} {name!r}, which is in the current folder alone"
                raise FormatError(f"{msg}; put that file beside {holder}")
            if not path.exists():
                self._watched.see(path.absolute(), None)
        return None

    def _watch_values(self, dataset: h5py.Dataset, name: str, depth: int = 0) -> int:
        """Watch the files with the values of a dataset; return how many elements are nowhere.

        HDF5 returns zeros for these, and for files that are missing or too short.
        """
        if dataset.external:
            self._watch_raw(dataset, name)
        if not dataset.is_virtual:
            return 0
        n_mapped = n_lost = 0
        for area, file_name, source_name, source_area in dataset.virtual_sources():
            what = f"`{name}` is virtual, with values of `{source_name}` in {file_name!r}"
            if depth == _MOST_VIRTUAL or _NUMBERED.search(file_name + source_name):
                raise self._elsewhere(f"{what}, which cellfeed does not follow", dataset)
            path = dataset.file.filename
            if file_name != ".":
                of = f"`{name}` is virtual, with values in"
                found = self._find(file_name, Path(path), "HDF5_VDS_PREFIX", of)
                if found is None:
                    raise self._elsewhere(f"{what}, which is not there", dataset)
                path = found
                self._watched.see(found, found.stat())
            with h5py.File(path, "r") as file:
                link = external_link(file, source_name)
                if link is not None and self._follow(link, name, Path(path)) is None:
                    raise self._elsewhere(f"{what}, which is not there", dataset)
                source = file.get(source_name)
                if not isinstance(source, h5py.Dataset):
                    raise self._elsewhere(f"{what}, which has no such array", dataset)
                if not _is_unlimited(area) and not _fits(source, area, source_area):
                    raise self._elsewhere(f"{what}, which now has another shape", dataset)
                n_mapped += min(_n_selected(dataset, area), _n_selected(source, source_area))
                n_lost += lost_chunks(source) + self._watch_values(source, name, depth + 1)
        return n_lost + max(0, int(dataset.size) - n_mapped)

    def _watch_raw(self, dataset: h5py.Dataset, name: str) -> None:
        """Watch the files with the bytes of a dataset, which HDF5 looks for as it is told here."""
        prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
        folder = _path_of(dataset.file).parent
        n_left = dataset.size * dataset.dtype.itemsize
        for file_name, offset, n_bytes in dataset.external:
            path = Path(prefix.replace("${ORIGIN}", str(folder)), file_name)
            what, n_here = f"`{name}` has its bytes in {file_name!r}", min(n_bytes, n_left)
            try:
                found = path.stat()
            except OSError:
                raise self._elsewhere(f"{what}, which is not there", dataset) from None
            if found.st_size < offset + n_here:
                raise self._elsewhere(f"{what}, which is too short", dataset)
            self._watched.see(path, found)
            n_left -= n_here

    def _elsewhere(self, what: str, dataset: h5py.Dataset) -> FormatError:
        msg = f"{self.location}: {what}; put that file back, or write `{dataset.name}` again"
        return FormatError(msg)


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


class _LatestFiles:
    """The files that HDF5 has open in this process: those that were opened last.

    Each takes a descriptor and 0.6 MB of memory. Where there are too many, that which has been open
    for longest is closed, and is opened again when it is needed.
    """

    def __init__(self) -> None:
        self.enter_process()

    def enter_process(self) -> None:
        """Begin anew, in a fork too: a thread that is gone may hold the lock."""
        self._lock = threading.Lock()
        # In the order of opening; without callbacks, in which Ctrl-C could be lost.
        self._files: list[weakref.ref[LocalH5File]] = []

    def add(self, file: LocalH5File) -> None:
        """Add a file that is open now, and close others if there are too many."""
        with self._lock:
            there = [each for known in self._files if (each := known()) not in (None, file)]
            n_open = len(there) + 1
            most = max(1, min(_MOST_IN_HDF5, share_of_descriptors(_SHARE_OF_HDF5, n_open)))
            self._files = [weakref.ref(each) for each in (*there, file)][-most:]
        for each in there[: max(0, n_open - most)]:
            each.close()


_MOST_IN_HDF5 = 64
_SHARE_OF_HDF5 = 8  # of the descriptors that are left; others belong to chunks and tables
_latest = _LatestFiles()
os.register_at_fork(after_in_child=_latest.enter_process)


class _OpenedFile:
    """A file that this process has open, and its state when it was opened.

    As long as one handle is open, HDF5 opens no other for the same file, and what it has read of
    the file before stays in memory.
    """

    _all: ClassVar[dict[tuple[int, int], list[_OpenedFile]]] = {}  # by device and inode

    def __init__(self, file: h5py.File, found: os.stat_result) -> None:
        self._file, self._identity = weakref.ref(file), identity(found)

    @classmethod
    def add(cls, file: h5py.File, found: os.stat_result) -> None:
        """Record the state of a file that is open now."""
        cls._all.setdefault(_inode_of(found), []).append(cls(file, found))

    @classmethod
    def is_of_earlier(cls, file: h5py.File) -> bool:
        """Return whether a handle is of a file that has changed since another was opened."""
        found = _state_of(file)
        same = cls._all.get(_inode_of(found), [])
        for each in list(same):
            if not each._file():  # noqa: SLF001 - it is gone, or closed
                with contextlib.suppress(ValueError):  # another thread has removed it
                    same.remove(each)
        return any(each._identity != identity(found) for each in list(same))  # noqa: SLF001


_MOST_VIRTUAL = 8  # virtual datasets of virtual datasets
_NUMBERED = re.compile(r"(?<!%)(%%)*%\d*b")  # names of any number of sources


def _path_of(file: h5py.File) -> Path:
    return Path(file.filename).absolute()


def _state_of(file: h5py.File) -> os.stat_result:
    return os.fstat(file.id.get_vfd_handle())


def _inode_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _fits(source: h5py.Dataset, area: h5py.h5s.SpaceID, source_area: h5py.h5s.SpaceID) -> bool:
    """Return whether the source of a virtual dataset still has what an area is mapped to.

    HDF5 may crash where it does not.
    """
    if source_area.get_select_type() == h5py.h5s.SEL_ALL:
        first, last = np.array(area.get_select_bounds())
        has_rows = source.ndim != len(first) or source.shape[1:] == (*(last - first + 1)[1:],)
        return has_rows and bool(source.size >= area.get_select_npoints())
    last = source_area.get_select_bounds()[1]
    return len(last) == source.ndim and bool(np.less(last, source.shape).all())


def _is_unlimited(area: h5py.h5s.SpaceID) -> bool:
    """Return whether an area has all rows that its dataset will ever have."""
    if area.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not area.is_regular_hyperslab():
        return False
    _, _, counts, blocks = area.get_regular_hyperslab()
    return h5py.h5s.UNLIMITED in (*counts, *blocks)


def _n_selected(dataset: h5py.Dataset, area: h5py.h5s.SpaceID) -> int:
    """Return how many elements of a dataset an area has."""
    if area.get_select_type() == h5py.h5s.SEL_ALL:
        return int(dataset.size)
    if not _is_unlimited(area):
        return int(area.get_select_npoints())
    n = 1
    for size, start, stride, count, block in zip(
        dataset.shape, *area.get_regular_hyperslab(), strict=True
    ):
        whole, rest = divmod(max(0, size - start), stride)
        n *= min(count * block, whole * min(block, stride) + min(block, rest))
    return n


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
