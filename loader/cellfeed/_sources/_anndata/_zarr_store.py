"""An AnnData group of a zarr store, opened on first use in each process."""

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import zarr
from anndata.io import read_elem

from cellfeed._bytes import (
    Identity,
    Location,
    identity,
    removed,
    replaced,
)
from cellfeed._chunks import (
    ChunkedArray,
    SlowRead,
    ZarrFiles,
    ZarrLayout,
    check_grid,
    chunk_grid,
    identity_of_files,
    zarr_array,
    zarr_codec,
    zarr_layout,
)
from cellfeed._sources._anndata._zarr_groups import open_group
from cellfeed._tables import KeptTables

__all__ = ["ZarrStore"]

_METADATA = {2: ".zarray", 3: "zarr.json"}
_NO_CHUNKS = {"zarr.json", ".zarray", ".zattrs"}


class ZarrStore:
    """A read-only AnnData group in a folder; zarr v2 or v3.

    Of an array that is watched, the metadata and the shards are those that were there when
    `watch` was called, in any process. Files of single chunks are not watched: there may be
    millions.

    Parameters
    ----------
    path
        The folder of the group.
    """

    library = "zarr"

    def __init__(self, path: Path) -> None:
        self.location = Location.of(path)
        self._path = path
        self._absolute = path.absolute()  # it stays the same where the working folder changes
        self._group: zarr.Group | None = None
        self._process = -1
        self._identities: dict[Path, Identity] = {}
        self._layouts: dict[str, ZarrLayout | SlowRead] = {}
        self._files: dict[str, ZarrFiles] = {}
        self._n_lost: dict[str, int] = {}

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
            self._group, self._process = open_group(self._path, self._absolute), os.getpid()
        return self._group

    def watch(self, names: Sequence[str]) -> None:
        """Remember metadata and shards of these arrays, so that a change is noticed."""
        for name in names:
            array = self.array(name)
            itemsize = array.dtype.itemsize
            check_grid(array.shape, array.chunks, itemsize, shard_shape=array.shards)
            metadata = Path(name) / _METADATA[array.metadata.zarr_format]
            self._identities[metadata] = self._identity(metadata)
            layout = self._layouts[name] = zarr_layout(array.metadata.to_dict())
            if isinstance(layout, ZarrLayout):
                self._files[name] = ZarrFiles(self._path / name, layout)

    def check_unchanged(self) -> None:
        """Check that the metadata is what it was; shards are checked when they are read.

        Raises
        ------
        FormatError
            An array was replaced.
        PathError
            It was removed.
        """
        for metadata, known in self._identities.items():
            if self._identity(metadata) != known:
                raise replaced(self._path / metadata)

    def bring(self, names: Sequence[str]) -> None:
        """Do nothing: zarr reads chunks side by side; see `AnnDataFile`."""

    def array(self, name: str) -> Any:
        """Return an array, for reading slices of it."""
        # With zarr's own codecs: those of zarrs are faster, but stop for ever in a forked process
        # once its parent has used them.
        return self()[name]

    def stored_bytes(self, name: str) -> int:
        """Return how many bytes the chunks or shards of an array take."""
        return sum(file.stat().st_size for file in self._chunk_files(name))

    def codec(self, name: str) -> str:
        """Return how an array is compressed: such as "blosc", "zstd, sharded" or "none"."""
        return zarr_codec(self.array(name).metadata.to_dict())

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only zarr itself can read an array; None if its chunks can be."""
        layout = self._layouts[name]
        return layout if isinstance(layout, SlowRead) else None

    def n_lost(self, name: str) -> int:
        """Return how many files of chunks or shards of an array are not there."""
        if name not in self._n_lost:
            array = self.array(name)
            file_shape = array.shards or array.chunks
            n_files = math.prod(chunk_grid(array.shape, file_shape))
            self._n_lost[name] = max(0, n_files - sum(1 for _ in self._chunk_files(name)))
        return self._n_lost[name]

    def _chunk_files(self, name: str) -> Iterator[Path]:
        """Yield the paths of an array's chunks or shards."""
        yield from (file for file in self._files_of(name) if file.name not in _NO_CHUNKS)

    def _files_of(self, name: str) -> Iterator[Path]:
        """Yield the paths of all files of an array."""
        for folder, _, files in os.walk(self._absolute / name):
            yield from (Path(folder, file) for file in files)

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return an array as chunks, None where `slow_read` gives a reason."""
        layout = self._layouts[name]
        if isinstance(layout, SlowRead):
            return None
        return zarr_array(
            layout, self._files[name], name, self.kept_tables(name), lost_is_zero=lost_is_zero
        )

    def kept_tables(self, name: str) -> KeptTables:
        """Return where tables that are made of an array are kept from one opening to the next."""
        folder = self._absolute / name
        return KeptTables(str(self._absolute), name, lambda: identity_of_files(folder))

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a form that anndata no longer writes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file is old is no news to its reader
            frame: pd.DataFrame = read_elem(self()[name])
        return frame

    def _identity(self, metadata: Path) -> Identity:
        try:
            return identity((self._absolute / metadata).stat())
        except OSError as error:
            raise removed(self._path / metadata) from error
