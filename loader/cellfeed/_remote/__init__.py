"""Bytes of web servers and object stores: opening objects, requesting ranges, caching them.

The ranges of a fetch are known before it is read. They are joined where that saves a round trip,
many requests are in flight at a time, and each answer waits for the fetch that needs it.
"""

from cellfeed._remote._asking import open_object, zarr_store
from cellfeed._remote._failures import failure, is_of_server
from cellfeed._remote._link import begin_with_requests
from cellfeed._remote._listing import expand_url, versions_below, versions_of
from cellfeed._remote._objects import RemoteObjects
from cellfeed._remote._opening import Version
from cellfeed._remote._outside_lock import outside_lock
from cellfeed._remote._pages import PagedFile, paged_file
from cellfeed._remote._scheduler import requests_under_way

__all__ = [
    "PagedFile",
    "RemoteObjects",
    "Version",
    "begin_with_requests",
    "expand_url",
    "failure",
    "is_of_server",
    "open_object",
    "outside_lock",
    "paged_file",
    "requests_under_way",
    "versions_below",
    "versions_of",
    "zarr_store",
]
