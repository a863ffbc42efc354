"""An HDF5 file on a web server or in an object store, unconverted."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil  # the lock that all of h5py takes: pages come under it

from cellfeed._errors import CellfeedError, FormatError
from cellfeed._lazy import pd
from cellfeed.bytes import LastingIdentity, Location, replaced
from cellfeed.bytes._remote import PagedFile, RemoteObjects, Version, paged_file
from cellfeed.bytes._tables import Tables
from cellfeed.sources._anndata._h5file import H5File, own_members

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
