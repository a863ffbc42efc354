"""Stores of obstore: which store a URL belongs to, and which object it names."""

import importlib
import threading
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

from cellfeed._bytes._location import Location, StorageOptions
from cellfeed._bytes._remote._disk_cache import DiskCache
from cellfeed._bytes._remote._failures import ChangedError
from cellfeed._bytes._remote._loop import ForkedError, check_process
from cellfeed._errors import DeliveryError, ParameterError, PathError

WEB = ("http", "https")
_AZURE = ("az",)
_CLIENT = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "5m"}
_BLOCKING = {"connect_timeout": "5s", "read_timeout": "5s", "timeout": "1m"}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Stores:
    """One store, as two objects of obstore.

    Parameters
    ----------
    store
        For asynchronous requests.
    blocking
        For requests in the calling thread, where Ctrl-C takes effect after the current request.
        Requests time out after five seconds, unless the user's ``client_options`` override this.
    """

    store: Any
    blocking: Any


_opened = WeakKeyDictionary[StorageOptions, dict[str, Stores]]()
_opening = threading.Lock()


@dataclass(frozen=True, slots=True)
class Version:
    """Identifies one version of the object at a URL.

    Parameters
    ----------
    size
        Size in bytes.
    etag
        ETag of the server, None if it sends none.
    modified
        Time of the last modification.
    """

    size: int
    etag: str | None
    modified: datetime | None

    @property
    def strong_etag(self) -> str | None:
        """The ETag, if no two contents can have the same one."""
        return None if self.etag is None or self.etag.startswith("W/") else self.etag

    def check(self, found: "Version") -> None:
        """Check that an answer is of this version.

        Raises
        ------
        ChangedError
            It is of another version.
        """
        if self.size != found.size:
            raise ChangedError
        if self.etag is not None and found.etag is not None:
            if self.etag != found.etag:
                raise ChangedError
        elif self.modified != found.modified:
            raise ChangedError


def version_of(meta: Any) -> Version:
    """Return the version in obstore's metadata of an object."""
    return Version(int(meta["size"]), meta.get("e_tag"), meta.get("last_modified"))


def object_store(location: Location) -> tuple[Any, str]:
    """Return obstore's store that contains an object, and the object's path; see `stores_of`."""
    stores, path = stores_of(location)
    return stores.store, path


def stores_of(location: Location) -> tuple[Stores, str]:
    """Return the store that contains an object, shared by equal options, and the object's path.

    It lives as long as the options, which belong to one `open_collection`.

    Raises
    ------
    DeliveryError
        This process was forked from one that has read from servers.
    ParameterError
        obstore is not installed, or rejects the storage options.
    PathError
        The URL names no object, or contains a credential.
    """
    try:
        check_process()
    except ForkedError:
        msg = (
            f"{location}: this process was forked from one that reads from servers, and its "
            "connections do not survive a fork; take minibatches from "
            "`dataset.loader(num_workers=...)`, or give the DataLoader "
            "multiprocessing_context='forkserver'"
        )
        raise DeliveryError(msg) from None
    root, path = _parted(location)
    with _opening:
        opened = _opened.setdefault(location.options, {})
        if root not in opened:
            opened[root] = Stores(
                _store(location, root, _CLIENT), _store(location, root, _BLOCKING)
            )
        return opened[root], path


@cache
def disk_cache(name: str, max_bytes: int) -> DiskCache | None:
    """Return a cache on this machine's disk, one per process; None if its size limit is 0."""
    return DiskCache(max_bytes, name=name) if max_bytes else None


def check_url(location: Location) -> None:
    """Check that a URL contains no credential, before any message shows it.

    Raises
    ------
    PathError
        It contains one, or may.
    """
    _parted(location)


def _parted(location: Location) -> tuple[str, str]:
    """Return the root URL of the store, and the path of the object in it."""
    parts = urlsplit(location.text)
    if "@" in parts.netloc and location.scheme in (*WEB, "s3", "gs"):
        msg = f"{location.shown}: URLs must not contain credentials; give them in `storage_options`"
        raise PathError(msg)
    is_web = location.scheme in WEB
    if not parts.netloc:
        raise PathError(f"{location}: names no {'server' if is_web else 'bucket'}; add it")
    # A key, or a pattern, may contain a question mark; a signature also contains an equals sign.
    if (parts.query and (is_web or "=" in parts.query)) or (is_web and parts.fragment):
        shown = location.shown
        msg = f"{shown}: URLs with a query cannot be read here; give a plain one, and credentials "
        raise PathError(f"{msg}in `storage_options`")
    path = parts.path if is_web else location.text.partition("://")[2].partition("/")[2]
    path = path.strip("/")
    root = f"{parts.scheme}://{parts.netloc}"
    if location.scheme in _AZURE:
        container, _, path = path.partition("/")
        root = f"{root}/{container}"
    # Paths on web servers are percent-encoded; keys of object stores are literal.
    return root, unquote(path) if location.scheme in WEB else path


def _store(location: Location, root: str, defaults: dict[str, str]) -> Any:
    try:
        stores: Any = importlib.import_module("obstore.store")  # optional, needed only here
    except ImportError:
        msg = f"{location}: URLs are read with obstore; install it: pip install 'cellfeed[remote]'"
        raise ParameterError(msg) from None
    values = dict(location.options.values)
    client = {**defaults, **(values.pop("client_options", None) or {})}
    # Retries are ours: obstore would repeat the whole range, and retries fewer errors.
    retries = {**(values.pop("retry_config", None) or {}), "max_retries": 0}
    allows_http = location.scheme == "http" or _is_plain(values)
    client.setdefault("allow_http", allows_http)
    try:
        if location.scheme in WEB:
            return stores.HTTPStore.from_url(
                root, client_options=client, retry_config=retries, **values
            )
        return stores.from_url(root, client_options=client, retry_config=retries, **values)
    except Exception as error:  # noqa: BLE001 - obstore's, Python's
        # Messages of obstore may contain the values.
        names = ", ".join(sorted(map(str, location.options.values))) or "none"
        msg = (
            f"{location}: obstore does not take these `storage_options` ({names}); "
            "see obstore's stores for their names and values"
        )
        raise ParameterError(msg) from (None if location.options.values else error)


def _is_plain(values: dict[str, Any]) -> bool:
    """Return whether the given endpoint is not encrypted."""
    return any(
        str(value).startswith("http://") for name, value in values.items() if "endpoint" in name
    )
