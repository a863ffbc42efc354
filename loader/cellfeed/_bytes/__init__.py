"""Where bytes come from, and what tells that they are still the same."""

from cellfeed._bytes._identity import (
    Identity,
    LastingIdentity,
    identity,
    lasting_identity,
    removed,
    replaced,
)

__all__ = ["Identity", "LastingIdentity", "identity", "lasting_identity", "removed", "replaced"]
