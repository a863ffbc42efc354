"""An HDF5 file of AnnData, local or remote: its arrays, and the locations of their chunks."""

from __future__ import annotations

import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import h5py

from cellfeed._bytes import ByteStore, Location
from cellfeed._chunks import (
    ChunkedArray,
    SlowRead,
    check_grid,
    chunk_grid,
    hdf5_array,
    hdf5_codec,
    hdf5_slow_read,
)
from cellfeed._lazy import ad, pd
from cellfeed._tables import KeptTables

__all__ = ["H5File"]


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
            self._file, self._process = self._open(), os.getpid()
        return self._file

    @abstractmethod
    def _open(self) -> h5py.File:
        """Open the file."""

    @property
    @abstractmethod
    def _lasting_name(self) -> str:
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

    def array(self, name: str) -> Any:
        """Return an array, for reading slices of it."""
        return self()[name]

    def stored_bytes(self, name: str) -> int:
        """Return the size of an array's elements in the file, in bytes."""
        return int(self()[name].id.get_storage_size())

    def codec(self, name: str) -> str:
        """Return the compression of an array, such as "gzip 4" or "none"."""
        return hdf5_codec(self()[name])

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only HDF5 can read an array; None if cellfeed can."""
        return hdf5_slow_read(self()[name])

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array were never written; 0 if they are not zeros."""
        dataset = self()[name]
        if dataset.chunks is None or not dataset.size or dataset.fillvalue != 0:
            return 0
        n_chunks = math.prod(chunk_grid(dataset.shape, dataset.chunks))
        return n_chunks - int(dataset.id.get_num_chunks())

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason."""
        return hdf5_array(
            self()[name], name, self._bytes(), self.kept_tables(name), lost_is_zero=lost_is_zero
        )

    def _bytes(self) -> ByteStore:
        """Return the byte store of chunks."""
        return self

    def kept_tables(self, name: str) -> KeptTables:
        """Return the cache for tables of an array between openings."""
        return KeptTables(self._lasting_name, name, self.identity)

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a format that anndata no longer writes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file is old is no news to its reader
            if "mod" in self():  # MuData, which came when anndata wrote tables as groups
                frame: pd.DataFrame = ad.io.read_elem(self()[name])
                return frame
            return self.read_oldest_frame(name)

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the location of the file."""
        return self.location

    def watch(self, names: Sequence[str]) -> None:
        """Check that these arrays are possible; the file that contains them is watched."""
        for name in names:
            stored = self()[name]
            if stored.chunks is not None:
                check_grid(stored.shape, stored.chunks, stored.dtype.itemsize)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_process": -1}
