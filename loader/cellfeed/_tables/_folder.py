"""The folder of tables: bounded, written by any number of processes at once."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from cellfeed._mapping import map_or_read
from cellfeed._tables._file import Tables, parse, size_of, write
from cellfeed.machine import cache_folder

__all__ = ["TableFolder"]

_MOST_BYTES = 5 * 10**9  # tables of 400 million cells and their chunks
_IN_USE_SECONDS = 24 * 3600  # for which a table that was looked up stays, whatever comes
_SUFFIX, _UNFINISHED = ".tables", ".unfinished"


class TableFolder:
    """Files of tables by name, ``tables`` in the `cache_folder`.

    Files are written under another name and renamed, so that each is whole, and stays what it is
    while it is mapped, even if it is removed or replaced. Of those that were not looked up for a
    day, the oldest make room for new ones; where that is not enough, nothing new is written.
    """

    @property
    def _path(self) -> Path:
        return cache_folder("tables")

    def read(self, name: str, key: bytes) -> Tables | None:
        """Return tables, read-only, None if there are none of this name.

        Raises
        ------
        OSError, ValueError
            They cannot be read, or are damaged, or are of something else.
        """
        path = self._path / f"{name}{_SUFFIX}"
        try:
            content = map_or_read(path)
        except FileNotFoundError:
            return None
        tables = parse(content, key)
        with suppress(OSError):
            os.utime(path)  # when it was used
        return tables

    def write(self, name: str, key: bytes, tables: Tables) -> None:
        """Write tables, unless the folder is full of others that are in use.

        Raises
        ------
        OSError
            They cannot be written.
        """
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._make_room(size_of(key, tables)):
            return
        descriptor, unfinished = tempfile.mkstemp(suffix=_UNFINISHED, dir=self._path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file, key, tables)
            Path(unfinished).replace(self._path / f"{name}{_SUFFIX}")
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise

    def _make_room(self, n_bytes: int) -> bool:
        """Remove files until there is room for another; return whether there is."""
        found = list[tuple[float, int, Path]]()
        for path in self._path.iterdir():
            with suppress(FileNotFoundError):  # another process removes some, too
                if path.suffix in {_SUFFIX, _UNFINISHED}:
                    state = path.stat()
                    found.append((state.st_mtime, state.st_size, path))
        taken, now = sum(size for _, size, _ in found), time.time()
        for used, size, path in sorted(found):
            if taken + n_bytes <= _MOST_BYTES or now - used < _IN_USE_SECONDS:
                break
            path.unlink(missing_ok=True)
            taken -= size
        return taken + n_bytes <= _MOST_BYTES
