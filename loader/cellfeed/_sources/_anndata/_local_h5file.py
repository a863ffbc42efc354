"""A local HDF5 file, whose chunks compiled threads read through its descriptor."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import (
    NO_OPTIONS,
    ByteStore,
    DirectFiles,
    Identity,
    LastingIdentity,
    Location,
    StorageOptions,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed._errors import FormatError, PathError
from cellfeed._lazy import ad, pd
from cellfeed._sources._anndata._h5file import H5File

__all__ = ["LocalH5File"]


class LocalH5File(H5File):
    """A file whose size and modification time are watched.

    Parameters
    ----------
    path
        The file.
    options
        Whether to read chunks with direct I/O.
    """

    def __init__(self, path: Path, options: StorageOptions = NO_OPTIONS) -> None:
        super().__init__(Location.of(path).with_options(options))
        self._absolute = path.absolute()  # it stays the same file where the folder changes
        self._identity: Identity | None = None
        self._opened: LastingIdentity | None = None  # the file as this process opened it
        self._direct: weakref.ref[DirectFiles] | None = None  # which refers to this

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_direct": None}

    def _bytes(self) -> ByteStore:
        """Return the byte store of chunks; the same for all arrays."""
        if not self.location.options.direct:
            return self
        direct = None if self._direct is None else self._direct()
        if direct is None:
            direct = DirectFiles(self)
            self._direct = weakref.ref(direct)
        return direct

    def _open(self) -> h5py.File:
        file = _open(self.location, self._absolute)
        found = os.fstat(file.id.get_vfd_handle())
        self._opened = lasting_identity([("", found)])
        self._compare(identity(found))
        return file

    @property
    def _lasting_name(self) -> str:
        return str(self._absolute)

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the open file; None if it was written to since it was opened.

        HDF5 may still have earlier contents in memory.
        """
        found = lasting_identity([("", os.fstat(self().id.get_vfd_handle()))])
        is_same = self._opened is not None and self._opened.digest == found.digest
        return self._opened if is_same else None

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return the file descriptor of HDF5; see `ByteStore`."""
        file = self()
        return np.full(len(files), file.id.get_vfd_handle(), np.int64), file

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of the file in bytes."""
        n_bytes = os.fstat(self().id.get_vfd_handle()).st_size
        return np.full(len(files), n_bytes, np.int64)

    def read_oldest_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` through anndata, which needs the whole file."""
        adata = ad.read_h5ad(self._absolute, backed="r")
        try:
            table: pd.DataFrame = adata.raw.var if name.startswith("raw") else getattr(adata, name)
            return table
        finally:
            adata.file.close()

    def check_unchanged(self) -> None:
        """Check that the path still leads to the file that was first opened."""
        try:
            found = identity(self._absolute.stat())
        except OSError as error:
            raise removed(self.location) from error
        self._compare(found)

    def _compare(self, found: Identity) -> None:
        if self._identity is None:
            self._identity = found
        if self._identity != found:
            raise replaced(self.location)


def _open(path: Location, absolute: Path) -> h5py.File:
    if not absolute.is_file():
        msg = f"{path}: no such file"
        raise PathError(msg)
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
            msg = f"{path}: is not an HDF5 file, so not .h5ad; give AnnData files"
        else:
            msg = f"{path}: cannot be opened as HDF5 ({error}); copy or download it again"
        raise FormatError(msg) from error
