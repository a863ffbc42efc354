"""Where bytes come from, and what tells that they are still the same."""

from cellfeed._bytes._identity import (
    Identity,
    LastingIdentity,
    digest_of,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed._bytes._location import SCHEMES, Location, StorageOptions
from cellfeed._bytes._store import ByteStore

__all__ = [
    "SCHEMES",
    "ByteStore",
    "Identity",
    "LastingIdentity",
    "Location",
    "StorageOptions",
    "digest_of",
    "identity",
    "lasting_identity",
    "removed",
    "replaced",
]
