"""Files of a shard, written sequentially, with checksums."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["WrittenFile", "sync_folder"]

_BUFFER_BYTES = 1 << 20


class WrittenFile:
    """A file that is written sequentially.

    Parameters
    ----------
    path
        Path of the file, which must not exist.

    Attributes
    ----------
    n_bytes, crc32
        Size and checksum of the bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path
        self.n_bytes = self.crc32 = 0
        self._file = path.open("xb", _BUFFER_BYTES)

    def write(self, data: bytes | NDArray[Any]) -> None:
        """Write bytes, or the elements of a contiguous array."""
        buffer = data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
        with self._named_errors():
            self._file.write(buffer)
        self.crc32 = zlib.crc32(buffer, self.crc32)
        self.n_bytes += len(buffer)

    def flush(self) -> None:
        """Make the bytes written so far visible to other processes."""
        self._file.flush()

    def discard(self) -> None:
        """Close the file; bytes that cannot be written are lost."""
        with suppress(OSError):
            self._file.close()

    def close(self, *, synced: bool = False) -> None:
        """Close the file; if ``synced``, wait until all bytes are on disk."""
        with self._named_errors():
            if synced and not self._file.closed:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Add the path to errors of the system, such as a full disk."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
