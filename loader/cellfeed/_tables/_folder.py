"""The folder of tables: bounded, and written by any number of processes concurrently."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from cellfeed._mapping import map_or_read
from cellfeed._tables._file import Tables, parse, size_of, write
from cellfeed.machine import cache_folder

__all__ = ["TableFolder"]

_MOST_BYTES = 5 * 10**9  # enough for tables of 400 million cells and their chunks
_IN_USE_SECONDS = 24 * 3600  # for which a table stays after its last use
_SUFFIX, _UNFINISHED = ".tables", ".unfinished"


class TableFolder:
    """Files of tables by name, ``tables`` in the `cache_folder`.

    Files are written under a temporary name and renamed, so each is complete, and a mapped file
    stays valid even if it is removed or replaced. Tables that have not been used for a day are
    evicted, oldest first, to make room for new ones; if that is not enough, nothing is written.
    """

    @property
    def _path(self) -> Path:
        return cache_folder("tables")

    def read(self, name: str, key: bytes) -> Tables | None:
        """Return the tables of a name, read-only; None if there are none.

        Raises
        ------
        OSError, ValueError
            They cannot be read, are damaged, or have another key.
        """
        path = self._path / f"{name}{_SUFFIX}"
        try:
            content = map_or_read(path)
        except FileNotFoundError:
            return None
        tables = parse(content, key)
        with suppress(OSError):
            os.utime(path)  # time of the last use
        return tables

    def write(self, name: str, key: bytes, tables: Tables) -> None:
        """Write tables, unless the folder is full of tables in use.

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
            with suppress(FileNotFoundError):  # another process may remove files concurrently
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
