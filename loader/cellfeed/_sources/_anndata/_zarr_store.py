"""An AnnData group of a zarr store, local or remote: its arrays, and their chunks."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from cellfeed._bytes import ByteStore, LastingIdentity, Location
from cellfeed._chunks import (
    ChunkedArray,
    SlowRead,
    ZarrLayout,
    check_grid,
    expect_numcodecs,
    zarr_array,
    zarr_codec,
    zarr_layout,
)
from cellfeed._lazy import pd, zarr
from cellfeed._sources._anndata._attributes import read_element
from cellfeed._tables import KeptTables

__all__ = ["ZarrStore"]


class ZarrStore(ABC):
    """A read-only AnnData group; zarr v2 or v3.

    The metadata and the shards of a watched array must stay those that existed when `watch` was
    called, in any process.

    Parameters
    ----------
    location
        The group.
    """

    library = "zarr"

    def __init__(self, location: Location) -> None:
        self.location = location
        self._group: zarr.Group | None = None
        self._process = -1
        self._layouts: dict[str, ZarrLayout | SlowRead] = {}
        self._files: dict[str, ByteStore] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_group": None, "_process": -1}

    def __call__(self) -> zarr.Group:
        """Return the group.

        Raises
        ------
        FormatError
            It is not a zarr group.
        """
        if self._group is None or self._process != os.getpid():
            self._group, self._process = self._open(), os.getpid()
        return self._group

    @abstractmethod
    def _open(self) -> zarr.Group:
        """Open the group."""

    @property
    @abstractmethod
    def _lasting_name(self) -> str:
        """Key under which tables of the store are cached."""

    @abstractmethod
    def _watch(self, name: str, zarr_format: int) -> None:
        """Record the metadata of an array, so that changes are noticed."""

    def _check_links(self, name: str) -> None:  # noqa: B027 - not abstract
        """Check that no file of an array is a link to nothing, which zarr would read as zeros.

        Raises
        ------
        PathError
            One is.
        """

    @abstractmethod
    def _files_of(self, name: str, layout: ZarrLayout) -> ByteStore:
        """Return the files of an array."""

    @abstractmethod
    def _identity_of(self, name: str) -> LastingIdentity | None:
        """Return the identity of all files of an array; None if unknown."""

    @abstractmethod
    def stored_bytes(self, name: str) -> int:
        """Return the size of an array's chunks or shards in bytes; 0 if unknown."""

    @abstractmethod
    def n_lost(self, name: str) -> int:
        """Return how many files of chunks or shards of an array are missing."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Check that the metadata has not changed; shards are checked when they are read.

        Raises
        ------
        FormatError
            An array was replaced.
        PathError
            It was removed.
        """

    def watch(self, names: Sequence[str]) -> None:
        """Record metadata and shards of these arrays, so that changes are noticed."""
        for name in names:
            array = self.stored(name)
            itemsize = array.dtype.itemsize
            check_grid(array.shape, array.chunks, itemsize, shard_shape=array.shards)
            self._watch(name, array.metadata.zarr_format)
            layout = self._layouts[name] = zarr_layout(array.metadata.to_dict())
            if isinstance(layout, ZarrLayout):
                self._files[name] = self._files_of(name, layout)
            else:
                self._check_links(name)

    def bring(self, names: Sequence[str]) -> None:  # noqa: B027 - not abstract
        """Do nothing, since zarr reads chunks concurrently; see `AnnDataFile`."""

    def stored(self, name: str) -> Any:
        """Return an array or group."""
        # With zarr's own codecs: those of zarrs are faster, but stop for ever in a forked process
        # once its parent has used them.
        expect_numcodecs()
        return self()[name]

    def read(self, name: str) -> Any:
        """Return an element as anndata reads it."""
        return read_element(self.stored(name))

    def codec(self, name: str) -> str:
        """Return the compression of an array, such as "blosc", "zstd, sharded" or "none"."""
        return zarr_codec(self.stored(name).metadata.to_dict())

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only zarr can read an array; None if cellfeed can."""
        layout = self._layouts[name]
        return layout if isinstance(layout, SlowRead) else None

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason."""
        layout = self._layouts[name]
        if isinstance(layout, SlowRead):
            return None
        return zarr_array(
            layout, self._files[name], name, self.kept_tables(name), lost_is_zero=lost_is_zero
        )

    def kept_tables(self, name: str) -> KeptTables:
        """Return the cache for tables of an array between openings."""
        return KeptTables(self._lasting_name, name, lambda: self._identity_of(name))

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a format that anndata no longer writes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file is old is no news to its reader
            frame: pd.DataFrame = self.read(name)
        return frame
