"""An AnnData group of a local zarr store."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cellfeed._bytes import (
    NO_OPTIONS,
    ByteStore,
    DirectFiles,
    Identity,
    LastingIdentity,
    Location,
    StorageOptions,
    broken_link,
    identity,
    removed,
    replaced,
)
from cellfeed._chunks import ZarrFiles, ZarrLayout, chunk_grid, identity_of_files
from cellfeed._lazy import zarr
from cellfeed._sources._anndata._zarr_groups import open_group
from cellfeed._sources._anndata._zarr_store import ZarrStore

__all__ = ["LocalZarrStore"]

_METADATA = {2: ".zarray", 3: "zarr.json"}
_NO_CHUNKS = {"zarr.json", ".zarray", ".zattrs"}


class LocalZarrStore(ZarrStore):
    """A group, with the sizes and modification times of its metadata and shards watched.

    Files of single chunks are not watched, since there may be millions.

    Parameters
    ----------
    path
        The folder of the group.
    options
        Whether to read chunks with direct I/O.
    """

    def __init__(self, path: Path, options: StorageOptions = NO_OPTIONS) -> None:
        super().__init__(Location.of(path).with_options(options))
        self._path = path
        self._absolute = path.absolute()  # it stays the same where the working folder changes
        self._identities: dict[Path, Identity] = {}
        self._n_lost: dict[str, int] = {}

    def _open(self) -> zarr.Group:
        return open_group(self._path, self._absolute)

    @property
    def _lasting_name(self) -> str:
        return str(self._absolute)

    def _watch(self, name: str, zarr_format: int) -> None:
        self._check_folders(name)
        metadata = Path(name) / _METADATA[zarr_format]
        self._identities[metadata] = self._identity(metadata)

    def stored(self, name: str) -> Any:
        """Return an array or group."""
        try:
            return super().stored(name)
        except KeyError:
            self._check_folders(name)
            raise

    def _check_folders(self, name: str) -> None:
        """Check that no folder of an array is a link to one that is missing."""
        path = self._absolute / name / "c"  # in which version 3 has chunks
        for folder in (path, *path.parents):
            if folder.is_symlink() and not folder.exists():
                raise broken_link(folder)

    def _check_links(self, name: str) -> None:
        """Check that no file of an array is a link to one that is missing; see `ZarrStore`."""
        for file in self._chunk_files(name):
            if file.is_symlink() and not file.exists():
                raise broken_link(file)

    def _files_of(self, name: str, layout: ZarrLayout) -> ByteStore:
        files = ZarrFiles(self._path / name, layout)
        return DirectFiles(files) if self.location.options.direct else files

    def _identity_of(self, name: str) -> LastingIdentity | None:
        return identity_of_files(self._absolute / name)

    def check_unchanged(self) -> None:
        """Check that the metadata has not changed; shards are checked when they are read."""
        for metadata, known in self._identities.items():
            if self._identity(metadata) != known:
                raise replaced(self._path / metadata)

    def stored_bytes(self, name: str) -> int:
        """Return the size of an array's chunks or shards in bytes."""
        return sum(file.stat().st_size for file in self._chunk_files(name))

    def n_lost(self, name: str) -> int:
        """Return how many files of chunks or shards of an array are missing."""
        if name not in self._n_lost:
            array = self.stored(name)
            n_files = math.prod(chunk_grid(array.shape, array.shards or array.chunks))
            self._n_lost[name] = max(0, n_files - sum(1 for _ in self._chunk_files(name)))
        return self._n_lost[name]

    def _chunk_files(self, name: str) -> Iterator[Path]:
        """Yield the paths of an array's chunks or shards."""
        for folder, _, files in os.walk(self._absolute / name, followlinks=True):
            yield from (Path(folder, file) for file in files if file not in _NO_CHUNKS)

    def _identity(self, metadata: Path) -> Identity:
        try:
            return identity((self._absolute / metadata).stat())
        except OSError as error:
            raise removed(self._path / metadata) from error
