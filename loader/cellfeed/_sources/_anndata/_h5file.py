"""An HDF5 file that is opened on first use in each process."""

import errno
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem
from numpy.typing import NDArray

from cellfeed._bytes import (
    ByteStore,
    Identity,
    LastingIdentity,
    Location,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed._chunks import (
    ChunkedArray,
    SlowRead,
    check_grid,
    chunk_grid,
    hdf5_array,
    hdf5_codec,
    hdf5_slow_read,
)
from cellfeed._errors import FormatError, PathError
from cellfeed._tables import KeptTables

__all__ = ["H5File"]


class H5File(ByteStore):
    """A read-only HDF5 file, opened lazily, never shared between processes.

    HDF5 handles do not survive a fork, and cannot be pickled. The handle is therefore kept
    beside the number of the process that opened it, and left out of a pickle.

    Parameters
    ----------
    path
        The file.
    """

    library = "h5py"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute = path.absolute()  # it stays the same file where the folder changes
        self._file: h5py.File | None = None
        self._process = -1
        self._identity: Identity | None = None
        self._opened: LastingIdentity | None = None  # the file as this process opened it

    def __call__(self) -> h5py.File:
        """Return the open file.

        Raises
        ------
        PathError
            There is no such file, or it may not be read.
        FormatError
            The file is truncated, or is not HDF5.
        """
        if self._file is None or self._process != os.getpid():
            self._file, self._process = _open(self.path, self._absolute), os.getpid()
            found = os.fstat(self._file.id.get_vfd_handle())
            self._opened = lasting_identity([("", found)])
            self._compare(identity(found))
        return self._file

    def array(self, name: str) -> Any:
        """Return an array, for reading slices of it."""
        return self()[name]

    def stored_bytes(self, name: str) -> int:
        """Return how many bytes the elements of an array take in the file."""
        return int(self()[name].id.get_storage_size())

    def codec(self, name: str) -> str:
        """Return how an array is compressed: such as "gzip 4" or "none"."""
        return hdf5_codec(self()[name])

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only HDF5 itself can read an array; None if its chunks can be."""
        return hdf5_slow_read(self()[name])

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array were never written, unless others than 0 stand in."""
        dataset = self()[name]
        if dataset.chunks is None or not dataset.size or dataset.fillvalue != 0:
            return 0
        n_chunks = math.prod(chunk_grid(dataset.shape, dataset.chunks))
        return n_chunks - int(dataset.id.get_num_chunks())

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return an array as chunks, None where `slow_read` gives a reason."""
        return hdf5_array(
            self()[name], name, self, self.kept_tables(name), lost_is_zero=lost_is_zero
        )

    def kept_tables(self, name: str) -> KeptTables:
        """Return where tables that are made of an array are kept from one opening to the next."""
        return KeptTables(self._absolute, name, self.identity)

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the open file, None if it was written to since it was opened.

        HDF5 may still know what was there before.
        """
        found = lasting_identity([("", os.fstat(self().id.get_vfd_handle()))])
        is_same = self._opened is not None and self._opened.digest == found.digest
        return self._opened if is_same else None

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a form that anndata no longer writes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file is old is no news to its reader
            if "mod" in self():  # MuData, which came when anndata wrote tables as groups
                frame: pd.DataFrame = read_elem(self()[name])
                return frame
            adata = ad.read_h5ad(self._absolute, backed="r")
        try:
            table: pd.DataFrame = adata.raw.var if name.startswith("raw") else getattr(adata, name)
            return table
        finally:
            adata.file.close()

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return the file descriptor, which is HDF5's own; see `ByteStore`."""
        file = self()
        return np.full(len(files), file.id.get_vfd_handle(), np.int64), file

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the path."""
        return Location.of(self.path)

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of the file."""
        n_bytes = os.fstat(self().id.get_vfd_handle()).st_size
        return np.full(len(files), n_bytes, np.int64)

    def watch(self, names: Sequence[str]) -> None:
        """Check that these arrays can be; they are all in the one file, which is watched."""
        for name in names:
            stored = self()[name]
            if stored.chunks is not None:
                check_grid(stored.shape, stored.chunks, stored.dtype.itemsize)

    def check_unchanged(self) -> None:
        """Check that the path still holds the file that was opened first, in any process.

        Rows of another file would not be those that were planned and labelled.

        Raises
        ------
        FormatError
            The file was replaced or written to.
        """
        try:
            found = identity(self._absolute.stat())
        except OSError as error:
            raise removed(self.path) from error
        self._compare(found)

    def _compare(self, found: Identity) -> None:
        if self._identity is None:
            self._identity = found
        if self._identity != found:
            raise replaced(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_process": -1}


def _open(path: Path, absolute: Path) -> h5py.File:
    if not absolute.is_file():
        msg = f"{path}: no such file"
        raise PathError(msg)
    try:
        # HDF5's default locking: another would clash with a handle that the user has open.
        return h5py.File(absolute, "r")
    except PermissionError as error:
        msg = f"{path}: may not be read; check its permissions"
        raise PathError(msg) from error
    except OSError as error:
        if error.errno == errno.EMFILE:
            msg = f"{path}: too many files are open; allow more, such as with `ulimit -n 65536`"
            raise PathError(msg) from error
        if "truncated file" in str(error):
            msg = f"{path}: the file is truncated; copy or download it again"
        elif not h5py.is_hdf5(absolute):
            msg = f"{path}: not an HDF5 file, so not .h5ad; give the AnnData files themselves"
        else:
            msg = f"{path}: cannot be opened as HDF5 ({error}); copy or download it again"
        raise FormatError(msg) from error
