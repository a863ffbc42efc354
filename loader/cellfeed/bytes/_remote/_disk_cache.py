"""Bytes of remote files that are cached on the disks of this machine, in a SQLite database.

SQLite keeps the database consistent if processes write to it concurrently, or are killed. Each
range also has a checksum of its key and its bytes, so that damage is detected when it is read.
"""

import logging
import sqlite3
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple
from urllib.parse import quote

from cellfeed.machine import cache_folder

_logger = logging.getLogger(__name__)

_TABLES = """
PRAGMA auto_vacuum = INCREMENTAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS objects (
    id INTEGER PRIMARY KEY, url TEXT, etag TEXT, n_bytes INTEGER, UNIQUE (url, etag, n_bytes)
);
CREATE TABLE IF NOT EXISTS ranges (
    id INTEGER PRIMARY KEY, object INTEGER, first INTEGER, size INTEGER, crc INTEGER, content BLOB,
    UNIQUE (object, first, size)
);
CREATE TABLE IF NOT EXISTS segments (id INTEGER PRIMARY KEY, used REAL);
COMMIT;
"""
_FIND = """
SELECT ranges.id, crc, content FROM ranges JOIN objects ON objects.id = object
WHERE url = ? AND etag = ? AND n_bytes = ? AND first = ? AND size = ?
"""
_INSERT = """
INSERT OR IGNORE INTO ranges (id, object, first, size, crc, content)
SELECT ?, id, ?, ?, ?, ? FROM objects WHERE url = ? AND etag = ? AND n_bytes = ?
"""
# Few at a time, since each statement is a transaction, whose journal also counts.
_EVICT_REPLACED = """
DELETE FROM ranges WHERE id IN (
    SELECT ranges.id FROM ranges JOIN objects ON objects.id = object
    WHERE url = ? AND (etag, n_bytes) <> (?, ?) LIMIT 256
)
"""
# The second, where a message has the name of a damaged table.
_FAILURES = sqlite3.Error, UnicodeDecodeError

_USED_PAGES = "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"

_PAGE = 4096  # of the database, in bytes
_FEWEST_PAGES = 32  # of a cache; the tables alone take 7
_SHARE_OF_JOURNAL, _LARGEST_JOURNAL = 32, 2**26  # reserved for the journal of a transaction
_PAGES_PER_RANGE = 4  # that a range may take beside its bytes
_LARGEST_RANGE = 2**29  # bytes; SQLite accepts up to 10**9
_SEGMENT = 64  # ranges that are written in one transaction, and evicted together
_IN_USE_SECONDS = 6 * 3600  # a sequential epoch over more than the cache holds can be long
_USED_EVERY_SECONDS = 60  # resolution of the time when a segment was last used
_LOCK_SECONDS = 1.0  # to wait for the lock before writing; after that, ranges are not cached
_BUSY_SECONDS = 10.0  # during which nothing is cached after a timeout of the lock
_READ_SECONDS = 10.0  # to wait for other processes before reading


class ObjectVersion(NamedTuple):
    """One version of a remote object.

    Parameters
    ----------
    url
        Its URL, without parts that change from one opening to the next, such as a signature.
    etag
        The server's strong ETag, which identifies the content.
    n_bytes
        Its size.
    """

    url: str
    etag: str
    n_bytes: int


class DiskCache:
    """A bounded cache of ranges of remote objects, shared by the processes of this machine.

    If more is read than fits, the ranges that came first stay until they have not been read for
    hours, so that every epoch finds a part of its data. Ranges of objects that were replaced on the
    server are evicted when their place is needed.

    No descriptor stays open, and a process that was forked, or that unpickled the cache, continues
    with the same database. A cache that cannot be used acts as empty, and logs this once, at the
    level INFO.

    Parameters
    ----------
    max_bytes
        Bound on the size of all its files.
    folder
        Parent of the cache's folder; `cache_folder` by default.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        self._folder = cache_folder("bytes") if folder is None else folder / "bytes"
        self._path = self._folder / "ranges.sqlite"
        journal = min(max_bytes // _SHARE_OF_JOURNAL, _LARGEST_JOURNAL)
        self._most_pages = (max_bytes - journal) // _PAGE
        self._is_off = self._most_pages < _FEWEST_PAGES
        self._busy_until = 0.0  # in seconds of `time.monotonic`
        if not self._is_off and self._path.exists():
            try:
                self._shrink()
            except _FAILURES as error:
                self._handle(error)

    def read(self, ranges: Sequence[tuple[ObjectVersion, int, int]]) -> list[bytes | None]:
        """Return the bytes of ranges, None for those that are not cached.

        Parameters
        ----------
        ranges
            Object, first byte and number of bytes of each. A range is found if it was written with
            the same first byte and size, and has not been evicted.
        """
        found: list[bytes | None] = [None if size else b"" for *_, size in ranges]
        wrong, segments, now = list[tuple[int]](), set[int](), time.time()
        try:
            with self._connected("ro", _READ_SECONDS) as database:
                for k, (version, first, size) in enumerate(ranges):
                    row = database.execute(_FIND, (*version, first, size)).fetchone()
                    if row is None:
                        continue
                    number, crc, content = row
                    if isinstance(content, bytes) and _crc(version, first, content) == crc:
                        found[k] = content
                        segments.add(number // _SEGMENT)
                    else:
                        wrong.append((number,))
                latest = now - _USED_EVERY_SECONDS
                unused = database.execute("SELECT id FROM segments WHERE used < ?", (latest,))
                used = [(now, each) for (each,) in unused if each in segments]
            if used or wrong:
                with suppress(sqlite3.OperationalError), self._writing(0.0) as database:
                    database.executemany("DELETE FROM ranges WHERE id = ?", wrong)
                    database.executemany("UPDATE segments SET used = ? WHERE id = ?", used)
        except _FAILURES as error:
            self._remove_if_damaged(error)
        return found

    def write(self, ranges: Sequence[tuple[ObjectVersion, int, bytes | memoryview]]) -> None:
        """Cache all, some or none of the ranges; never raises an error.

        Parameters
        ----------
        ranges
            Object, first byte and bytes of each. They are not referenced after the call.
        """
        most = min(self._most_pages * _PAGE, _LARGEST_RANGE)
        ranges = [each for each in ranges if 0 < len(each[2]) < most]
        if self._is_off or not ranges or time.monotonic() < self._busy_until:
            return
        try:
            try:
                self._write(ranges)
            except _FAILURES as error:
                if not self._remove_if_damaged(error):
                    raise
                self._write(ranges)
        except (OSError, ValueError, RuntimeError, MemoryError, sqlite3.Error) as error:
            self._handle(error)

    def _write(self, ranges: Sequence[tuple[ObjectVersion, int, bytes | memoryview]]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(len(content) for *_, content in ranges) > disk_usage(self._folder).free:
            return
        for begin in range(0, len(ranges), _SEGMENT):
            some = ranges[begin : begin + _SEGMENT]
            versions = {version for version, *_ in some}
            self._make_room(sum(_pages(content) for *_, content in some), versions)
            with self._writing(_LOCK_SECONDS) as database:
                objects = "INSERT OR IGNORE INTO objects (url, etag, n_bytes) VALUES (?, ?, ?)"
                database.executemany(objects, versions)
                (newest,) = database.execute("SELECT max(id) FROM ranges").fetchone()
                segment = (newest or 0) // _SEGMENT + 1
                for number, (version, first, content) in enumerate(some, segment * _SEGMENT):
                    if _pages(content) <= self._room(database):
                        crc = _crc(version, first, content)
                        values = number, first, len(content), crc, content, *version
                        database.execute(_INSERT, values)
                used = segment, time.time()
                database.execute("INSERT OR REPLACE INTO segments VALUES (?, ?)", used)

    def _make_room(self, n_pages: int, versions: Collection[ObjectVersion]) -> None:
        """Evict ranges if fewer pages are free: replaced ones, then those unused for hours."""
        with self._connected("rwc", _LOCK_SECONDS) as database:
            for version in versions:
                while self._room(database) < n_pages:
                    if not database.execute(_EVICT_REPLACED, version).rowcount:
                        break
            self._evict(database, n_pages, time.time() - _IN_USE_SECONDS)

    def _evict(self, database: sqlite3.Connection, n_pages: int, used_before: float) -> None:
        """Evict segments, least recently used first, until so many pages are free."""
        if self._room(database) >= n_pages:
            return
        query = "SELECT id FROM segments WHERE used < ? ORDER BY used"
        for (segment,) in database.execute(query, (used_before,)).fetchall():
            numbers = segment * _SEGMENT, (segment + 1) * _SEGMENT - 1
            database.execute("DELETE FROM ranges WHERE id BETWEEN ? AND ?", numbers)
            database.execute("DELETE FROM segments WHERE id = ?", (segment,))
            if self._room(database) >= n_pages:
                return

    def _shrink(self) -> None:
        """Evict ranges until the bound holds, which may be lower than before."""
        with self._connected("rwc", _LOCK_SECONDS) as database:
            (n_pages,) = database.execute("PRAGMA page_count").fetchone()
            self._evict(database, 0, float("inf"))
            step = max(_FEWEST_PAGES, self._most_pages // 256)  # by which the journal is bounded
            for _ in range(self._most_pages, n_pages, step):
                database.executescript(f"PRAGMA incremental_vacuum({step})")

    def _room(self, database: sqlite3.Connection) -> int:
        """Return the number of free pages."""
        (n_used,) = database.execute(_USED_PAGES).fetchone()
        return self._most_pages - int(n_used)

    @contextmanager
    def _writing(self, seconds: float) -> Iterator[sqlite3.Connection]:
        """Connect for one transaction."""
        with self._connected("rwc", seconds) as database, database:
            database.execute("BEGIN IMMEDIATE")
            yield database

    @contextmanager
    def _connected(self, mode: str, seconds: float) -> Iterator[sqlite3.Connection]:
        """Connect to the database, and wait so long for other processes.

        Raises
        ------
        sqlite3.Error
            It cannot be opened.
        """
        name = f"file:{quote(str(self._path))}?mode={mode}"
        database = sqlite3.connect(name, timeout=seconds, isolation_level=None, uri=True)
        with closing(database):
            if mode == "rwc":
                # A range that was not written completely is detected by its checksum.
                database.execute("PRAGMA synchronous = OFF")
                if database.execute("PRAGMA schema_version").fetchone() == (0,):
                    database.executescript(_TABLES)
            yield database

    def _remove_if_damaged(self, error: Exception) -> bool:
        """Remove the database if it is damaged; return whether it was."""
        damage = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
        is_damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in damage
        if not (is_damaged or isinstance(error, UnicodeDecodeError)):
            return False
        with suppress(OSError):
            for path in self._folder.glob(f"{self._path.name}*"):
                path.unlink(missing_ok=True)
            return True
        return False

    def _handle(self, error: Exception) -> None:
        """Continue without the cache: for a while if others are writing to it, or for good."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            self._busy_until = time.monotonic() + _BUSY_SECONDS
        elif not self._remove_if_damaged(error):
            if not self._is_off:
                _logger.info("bytes from servers are not cached on disk: %s", error)
            self._is_off = True


def _crc(version: ObjectVersion, first: int, content: bytes | memoryview) -> int:
    """Return the checksum of a range's key and bytes."""
    return zlib.crc32(content, zlib.crc32(f"{tuple(version)} {first}".encode()))


def _pages(content: bytes | memoryview) -> int:
    """Return an upper bound of the pages that a range takes."""
    return len(content) // _PAGE + _PAGES_PER_RANGE
