"""Bytes of web servers and object stores: opened, asked for in ranges, and kept.

A fetch's ranges are known before it is read. They are joined where that saves a round trip, many
requests are under way at a time, and what arrives waits for the fetch that it belongs to.
"""

from cellfeed._remote._failures import failure, is_of_server
from cellfeed._remote._listing import expand_url, versions_below, versions_of
from cellfeed._remote._objects import RemoteObjects
from cellfeed._remote._opening import SCHEMES, Version, is_remote, open_object, zarr_store
from cellfeed._remote._pages import PagedFile

__all__ = [
    "SCHEMES",
    "PagedFile",
    "RemoteObjects",
    "Version",
    "expand_url",
    "failure",
    "is_of_server",
    "is_remote",
    "open_object",
    "versions_below",
    "versions_of",
    "zarr_store",
]
