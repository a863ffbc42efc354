"""Sources of bytes, and checks that they have not changed."""

from cellfeed._bytes._direct import DirectFiles
from cellfeed._bytes._direct_support import check_direct
from cellfeed._bytes._identity import (
    Identity,
    LastingIdentity,
    broken_link,
    digest_of,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed._bytes._location import NO_OPTIONS, SCHEMES, Location, StorageOptions
from cellfeed._bytes._store import Arrival, ByteStore, UnreadableRangeError
from cellfeed._bytes._waits import LOOK_UP_SECONDS, is_awaited, threads_until_left, until_left

__all__ = [
    "LOOK_UP_SECONDS",
    "NO_OPTIONS",
    "SCHEMES",
    "Arrival",
    "ByteStore",
    "DirectFiles",
    "Identity",
    "LastingIdentity",
    "Location",
    "StorageOptions",
    "UnreadableRangeError",
    "broken_link",
    "check_direct",
    "digest_of",
    "identity",
    "is_awaited",
    "lasting_identity",
    "removed",
    "replaced",
    "threads_until_left",
    "until_left",
]
