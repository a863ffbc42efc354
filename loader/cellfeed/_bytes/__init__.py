"""Where bytes come from, and what tells that they are still the same."""

from cellfeed._bytes._identity import (
    Identity,
    LastingIdentity,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed._bytes._location import Location

__all__ = [
    "Identity",
    "LastingIdentity",
    "Location",
    "identity",
    "lasting_identity",
    "removed",
    "replaced",
]
