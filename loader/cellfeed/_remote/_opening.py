"""Which store of obstore a URL is in, and which object of that is the one that it names."""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from cellfeed._bytes import Location
from cellfeed._errors import CellfeedError, DeliveryError, ParameterError, PathError
from cellfeed._remote._failures import ChangedError, failure, is_overload, may_pass
from cellfeed._remote._loop import ForkedError, check_process

__all__ = [
    "N_ATTEMPTS",
    "SCHEMES",
    "Version",
    "attempt",
    "is_remote",
    "object_store",
    "open_object",
    "pause_before",
    "version_of",
    "zarr_store",
]

SCHEMES = ("http", "https", "s3", "gs", "az", "abfs", "abfss")
N_ATTEMPTS = 6

_WEB = ("http", "https")
_AZURE = ("az",)
_CLIENT = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "5m"}
_opened = dict[tuple[str, int], tuple[object, Any]]()

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Version:
    """What tells an object from another one of the same URL.

    Parameters
    ----------
    size
        Its bytes.
    etag
        What its server calls this version, None if it has no name for it.
    modified
        When it was changed.
    """

    size: int
    etag: str | None
    modified: datetime | None

    def check(self, found: "Version") -> None:
        """Check that an answer is of this version.

        Raises
        ------
        ChangedError
            It is of another one.
        """
        if self.size != found.size:
            raise ChangedError
        if self.etag is not None and found.etag is not None:
            if self.etag != found.etag:
                raise ChangedError
        elif self.modified != found.modified:
            raise ChangedError


def version_of(meta: Any) -> Version:
    """Return the version that obstore's metadata of an object tells of."""
    return Version(int(meta["size"]), meta.get("e_tag"), meta.get("last_modified"))


def is_remote(location: Location) -> bool:
    """Return whether a location is on a web server or in an object store."""
    return location.scheme in SCHEMES


def object_store(location: Location) -> tuple[Any, str]:
    """Return obstore's store that an object is in, one for the process, and its path there.

    Raises
    ------
    DeliveryError
        This process was forked from one that has read from servers.
    ParameterError
        obstore is not installed, or does not take the storage options.
    PathError
        The URL names no object.
    """
    try:
        check_process()
    except ForkedError:
        msg = (
            f"{location}: this process was forked from one that reads from servers, which no fork "
            "survives; take minibatches from `dataset.loader(num_workers=...)`, or give a "
            "DataLoader multiprocessing_context='forkserver'"
        )
        raise DeliveryError(msg) from None
    root, path = _parted(location)
    key = root, id(location.options)
    if key not in _opened:
        # The options are kept with it, so that no others get their number.
        _opened[key] = location.options, _store(location, root)
    return _opened[key][1], path


def zarr_store(location: Location) -> tuple[Any, str]:
    """Return a store of zarr that a group is in, and its path there.

    Raises
    ------
    CellfeedError
        As of `object_store`.
    """
    store, path = object_store(location)
    wrapped: Any = importlib.import_module("zarr.storage").ObjectStore
    return wrapped(store, read_only=True), path


def _parted(location: Location) -> tuple[str, str]:
    """Return the root of the store, and the path of the object in it."""
    parts = urlsplit(location.text)
    if location.scheme in _WEB and (parts.query or parts.fragment):
        shown = location.text.partition("?")[0]
        msg = f"{shown}: URLs with a query cannot be read in ranges here; give a plain one"
        raise PathError(msg)
    path = parts.path.strip("/")
    root = f"{parts.scheme}://{parts.netloc}"
    if location.scheme in _AZURE:
        container, _, path = path.partition("/")
        root = f"{root}/{container}"
    # That of a web server is quoted; keys of object stores are as they are.
    return root, unquote(path) if location.scheme in _WEB else path


def _store(location: Location, root: str) -> Any:
    try:
        stores: Any = importlib.import_module("obstore.store")  # an extra, and only here
    except ImportError:
        msg = f"{location}: URLs are read with obstore; install it: pip install 'cellfeed[remote]'"
        raise ParameterError(msg) from None
    values = dict(location.options.values)
    client = {**_CLIENT, **(values.pop("client_options", None) or {})}
    retries = values.pop("retry_config", None) or {"max_retries": 0}  # it is tried again by us
    allows_http = location.scheme == "http" or _is_plain(values)
    client.setdefault("allow_http", allows_http)
    try:
        if location.scheme in _WEB:
            return stores.HTTPStore.from_url(
                root, client_options=client, retry_config=retries, **values
            )
        return stores.from_url(root, client_options=client, retry_config=retries, **values)
    except Exception as error:  # noqa: BLE001 - obstore's, Python's
        # What obstore says may hold the values.
        names = ", ".join(sorted(map(str, location.options.values))) or "none"
        msg = (
            f"{location}: obstore does not take these `storage_options` ({names}); "
            "see obstore's stores for their names and values"
        )
        raise ParameterError(msg) from (None if location.options.values else error)


def _is_plain(values: dict[str, Any]) -> bool:
    """Return whether the endpoint that is given is not encrypted."""
    return any(
        str(value).startswith("http://") for name, value in values.items() if "endpoint" in name
    )


def open_object(location: Location) -> Version:
    """Ask for the version of an object.

    Raises
    ------
    PathError
        There is no such object.
    RemoteError
        The server cannot be reached, or refuses.
    """
    store, path = object_store(location)
    return version_of(attempt(location, lambda: store.head(path)))


def attempt(
    location: Location,
    ask: Callable[[], _Answer],
    first: int | None = None,
    stop: int | None = None,
) -> _Answer:
    """Ask a server, again where that may help, in the calling thread.

    Raises
    ------
    CellfeedError
        It does not answer; names the object, and the bytes from ``first`` to ``stop``.
    """
    for n in range(N_ATTEMPTS):
        try:
            return ask()
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever obstore raises
            if n + 1 == N_ATTEMPTS or not may_pass(error):
                raise failure(error, location, first, stop) from None
            time.sleep(pause_before(n + 1, is_overloaded=is_overload(error)))
    raise AssertionError


def pause_before(n: int, *, is_overloaded: bool) -> float:
    """Return how long to wait before the n-th further attempt, in seconds: 0.1, 0.3, 0.9 and so on.

    A server that has too much to do is given five times as long.
    """
    return 0.1 * 3.0 ** (n - 1) * (5 if is_overloaded else 1)
