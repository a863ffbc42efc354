"""Tables of an array, computed once and found again by later openings of the same file."""

import json
import logging
import sys
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

from cellfeed._bytes import LastingIdentity
from cellfeed._tables._file import Tables
from cellfeed._tables._folder import TableFolder
from cellfeed._version import __version__

__all__ = ["KeptTables", "Tables"]

Made = TypeVar("Made", Tables, Tables | None)

_logger = logging.getLogger(__name__)

_FORMAT = 1  # of the files, and of the meaning of their tables
_FEWEST_ENTRIES = 100_000  # fewer are read in less than 0.1 s, and take less than 2 MB


class KeptTables:
    """Tables computed from one stored array, cached in the user's cache folder.

    A cached table is memory-mapped, so its memory is that of the page cache, shared by all
    processes of the machine. Its key is the path of the storage, its identity, the array and the
    table's dependencies, and the versions of cellfeed and of the format; it is used only if its
    checksum is right. Without a working cache, tables are recomputed.

    Parameters
    ----------
    name
        The file or folder, absolute, or the URL.
    array
        Path of the array in the storage.
    identity
        Returns the current identity of the storage, None if it is not known.
    """

    def __init__(
        self, name: str, array: str, identity: Callable[[], LastingIdentity | None]
    ) -> None:
        self._name = name
        self._array = array
        self._identity = identity

    def get(
        self,
        depends_on: str,
        n_entries: int,
        make: Callable[[], Made],
        *,
        fewest: int | None = None,
    ) -> Made | Tables:
        """Return tables: mapped if cached, otherwise computed, and cached if that is worth it.

        Parameters
        ----------
        depends_on
            Names the tables and what they depend on besides the content of the storage.
        n_entries
            Length of the longest table.
        make
            Computes them; its exceptions are passed on. None if the tables cannot be computed.
        fewest
            Minimum number of entries to cache; by default, as many as take 0.1 s to read.
        """
        if n_entries < (_FEWEST_ENTRIES if fewest is None else fewest):
            return make()
        before = self._identity()
        if before is None or not before.is_settled:
            return make()
        key = self._key(before, depends_on)
        name = blake2b(key, digest_size=16).hexdigest()
        folder = TableFolder()
        kept: Tables | None = _or_none(lambda: folder.read(name, key))
        if kept is not None:
            return kept
        made = make()
        # A change while computing may have mixed old and new content.
        if self._identity() != before or made is None:
            return made
        _or_none(lambda: folder.write(name, key, made))
        again: Tables | None = _or_none(lambda: folder.read(name, key))
        return made if again is None else again

    def _key(self, identity: LastingIdentity, depends_on: str) -> bytes:
        facts = {
            "array": self._array,
            "byteorder": sys.byteorder,
            "cellfeed": __version__,
            "depends on": depends_on,
            "format": _FORMAT,
            "identity": identity.digest,
            "path": self._name,
        }
        return json.dumps(facts, sort_keys=True).encode()


def _or_none(step: Callable[[], Any]) -> Any:
    """Return the result of a step, None if the cache cannot be used for any reason."""
    try:
        return step()
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, MemoryError) as error:
        _logger.info("tables cannot be cached for later openings: %s", error)
        return None
