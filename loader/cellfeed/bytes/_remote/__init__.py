"""Bytes of web servers and object stores: opening objects, requesting ranges.

The ranges of a fetch are known before it is read. They are joined where that saves a round trip,
many requests are in flight at a time, and each answer waits for the fetch that needs it.
"""

from cellfeed.bytes._remote._client import (
    Version,
    expand_url,
    failure,
    is_of_server,
    open_object,
    versions_below,
    versions_of,
    zarr_store,
)
from cellfeed.bytes._remote._objects import (
    RemoteObjects,
    begin_with_requests,
    requests_under_way,
)
from cellfeed.bytes._remote._pages import PagedFile, outside_lock, paged_file
