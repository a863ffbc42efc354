"""The files of a zarr array: shards, which stay open, and files of single chunks."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks._folder_files import FolderFiles
from cellfeed._chunks._zarr_layout import ZarrLayout

__all__ = ["ZarrFiles"]


class ZarrFiles(FolderFiles):
    """The files of one array.

    A shard is read often, so its file stays open unless there are too many. Other files are
    opened for each read, by path, and may change.

    Parameters
    ----------
    folder
        The array's folder, as the user gave it.
    layout
        Layout of the array.
    """

    def __init__(self, folder: Path, layout: ZarrLayout) -> None:
        self._layout = layout
        n_files = math.prod(layout.file_grid) if layout.sharded else 0
        super().__init__(folder, layout.file_names, n_files)

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of files in bytes, for shards the first observed; -1 if missing."""
        if self._layout.sharded:
            return super().sizes(files)
        return np.array([size for size, _ in self._found(files)], np.int64)

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return descriptors or addresses of paths; see `ByteStore`."""
        return super().handles(files) if self._layout.sharded else self._addresses(files)

    def check_unchanged(self, files: NDArray[np.int64]) -> None:
        """Check that shards have not changed since the first check; see `FolderFiles`."""
        if self._layout.sharded:
            super().check_unchanged(files)
