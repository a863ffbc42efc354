"""Sources of bytes, and checks that they have not changed."""

from cellfeed._bytes._location import (
    NO_OPTIONS,
    SCHEMES,
    Identity,
    LastingIdentity,
    Location,
    StorageOptions,
    appeared,
    broken_link,
    digest_of,
    digest_of_array,
    has_suffix,
    identity,
    lasting_identity,
    removed,
    replaced,
    require_file,
)
from cellfeed._bytes._store import (
    LOOK_UP_SECONDS,
    Arrival,
    ByteStore,
    is_awaited,
    threads_until_left,
    until_left,
)
