"""Tables of an array, made once and found again by whoever opens the same file."""

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

_FORMAT = 1  # of the files, and of what the tables in them mean
_FEWEST_ENTRIES = 100_000  # fewer are read in less than 0.1 s, and take less than 2 MB


class KeptTables:
    """Tables that are made of one stored array, kept in the user's cache folder.

    A table that was kept is mapped, so that its memory is that of the page cache, shared by all
    processes of the machine. It is looked up by the path of the storage, its identity, the array
    and what the table depends on, and by the versions of cellfeed and of the format; and it is
    used only if its checksum is right. Without a cache that works, tables are made anew.

    Parameters
    ----------
    name
        The file or folder, absolute, or the URL.
    array
        Path of the array in it.
    identity
        Returns the identity of the storage as it is now, None if that is not known.
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
        """Return tables, mapped if they were kept, and else made, and kept if that is worth it.

        Parameters
        ----------
        depends_on
            What the tables are, and what they depend on beside the content of the storage.
        n_entries
            Length of the longest of them.
        make
            Makes them; what it raises is passed on. None if there can be none.
        fewest
            Entries from which on it is worth it; as many as take 0.1 s to read if None.
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
        # What changed meanwhile may be half of the one and half of the other.
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
    """Return what a step returns, None if the cache cannot be used for whatever reason."""
    try:
        return step()
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, MemoryError) as error:
        _logger.info("tables cannot be cached for later openings: %s", error)
        return None
