"""Connections to servers: the store of a URL, the thread that runs requests, errors, and listing.

Requests run in one thread with an event loop, many at a time. When the process exits, pending
requests are cancelled instead of waiting for a server.
"""

import asyncio
import atexit
import importlib
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

from cellfeed._errors import (
    CellfeedError,
    DeliveryError,
    FormatError,
    ParameterError,
    PathError,
    RemoteError,
)
from cellfeed.bytes._location import Location, StorageOptions, has_suffix
from cellfeed.bytes._store import LOOK_UP_SECONDS, is_cancelled

_Answer = TypeVar("_Answer")

WEB = ("http", "https")
_CLIENT = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "5m"}
_BLOCKING = {"connect_timeout": "5s", "read_timeout": "5s", "timeout": "1m"}
# obstore retries what may pass, ten times, and goes on where an answer broke off, if the ETag is
# the same. With this base, pauses take some 20 s in all; with its own, 2, some 4 s, which may be
# too short for a server that is overloaded.
_RETRIES = {"backoff": {"base": 3}}
_BLOCKING_RETRIES = _RETRIES | {"retry_timeout": timedelta(seconds=20)}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Stores:
    """One store, as two objects of obstore.

    Parameters
    ----------
    store
        For asynchronous requests.
    blocking
        For requests in the calling thread, where Ctrl-C takes effect after the current request.
        Requests time out after five seconds, and are retried for 20, unless the user's options
        override this.
    """

    store: Any
    blocking: Any


_REPLACED = "was replaced or written to since it was opened; open it again"

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

    def check(
        self, answer: Any, content: memoryview, location: Location, first: int, stop: int
    ) -> None:
        """Check that an answer of obstore, the result of a ``get``, is what was requested.

        Parameters
        ----------
        answer, content
            The answer, and its bytes.
        location, first, stop
            The object, and the requested bytes.

        Raises
        ------
        FormatError
            It is of another version.
        RemoteError
            It has more or fewer bytes.
        """
        found = version_of(answer.meta)
        has_etags = self.etag is not None and found.etag is not None
        is_same = self.etag == found.etag if has_etags else self.modified == found.modified
        where = f"{location} (bytes {first} to {stop})"
        if self.size != found.size or not is_same:
            raise FormatError(f"{where}: {_REPLACED}")
        if len(content) != stop - first:
            what = f"the server returned {len(content):,} bytes, not {stop - first:,}"
            raise RemoteError(f"{where}: {what}; upload it again if that persists")


def version_of(meta: Any) -> Version:
    """Return the version in obstore's metadata of an object."""
    return Version(int(meta["size"]), meta.get("e_tag"), meta.get("last_modified"))


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
    global _process  # noqa: PLW0603 - one client for the process
    if is_forked():
        msg = (
            f"{location}: this process was forked from one that reads from servers, and its "
            "connections do not survive a fork; take minibatches from "
            "`dataset.loader(num_workers=...)`, or give the DataLoader "
            "multiprocessing_context='forkserver'"
        )
        raise DeliveryError(msg)
    _process = os.getpid()
    root, path = split_url(location)
    with _opening:
        opened = _opened.setdefault(location.options, {})
        if root not in opened:
            opened[root] = Stores(
                _store(location, root, _CLIENT, _RETRIES),
                _store(location, root, _BLOCKING, _BLOCKING_RETRIES),
            )
        return opened[root], path


def split_url(location: Location) -> tuple[str, str]:
    """Return the root URL of the store, and the path of the object in it.

    Raises
    ------
    PathError
        The URL names no store, or contains a credential, which no message then shows.
    """
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
    if location.scheme == "az":
        container, _, path = path.partition("/")
        root = f"{root}/{container}"
    # Paths on web servers are percent-encoded; keys of object stores are literal.
    return root, unquote(path) if location.scheme in WEB else path


def _store(location: Location, root: str, client: dict[str, Any], retries: dict[str, Any]) -> Any:
    try:
        stores: Any = importlib.import_module("obstore.store")  # optional, needed only here
    except ImportError:
        msg = f"{location}: URLs are read with obstore; install it: pip install 'cellfeed[remote]'"
        raise ParameterError(msg) from None
    values = dict(location.options.values)
    client = {**client, **(values.pop("client_options", None) or {})}
    retries = {**retries, **(values.pop("retry_config", None) or {})}
    endpoints = [str(value) for name, value in values.items() if "endpoint" in name]
    allows_http = location.scheme == "http" or any(each.startswith("http://") for each in endpoints)
    client.setdefault("allow_http", allows_http)
    try:
        from_url = stores.HTTPStore.from_url if location.scheme in WEB else stores.from_url
        return from_url(root, client_options=client, retry_config=retries, **values)
    except Exception as error:  # noqa: BLE001 - obstore's, Python's
        # Messages of obstore may contain the values.
        names = ", ".join(sorted(map(str, location.options.values))) or "none"
        msg = (
            f"{location}: obstore does not take these `storage_options` ({names}); "
            "see obstore's stores for their names and values"
        )
        raise ParameterError(msg) from (None if location.options.values else error)


# The thread that runs requests.

_END_SECONDS, _END_STEP_SECONDS = 2.0, 0.005


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that knows the futures which obstore's threads still refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.held = weakref.WeakSet[asyncio.Future[Any]]()

    def create_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = super().create_future()
        self.held.add(future)
        return future


_lock = threading.Lock()
_loop: _Loop | None = None
_thread: threading.Thread | None = None
_process = -1  # that used the client, whose threads do not survive a fork


def is_forked() -> bool:
    """Return whether the process was forked from one that used the network client."""
    return _process not in (-1, os.getpid())


def in_loop(call: Callable[..., object], *arguments: Any) -> None:
    """Schedule a call in the thread of the loop; returns immediately."""
    loop = _started()
    if not loop.is_closed():  # as it is when the process exits
        loop.call_soon_threadsafe(call, *arguments)


def _started() -> _Loop:
    global _loop, _thread  # noqa: PLW0603 - one loop for the process
    if _loop is not None:  # without the lock, which this thread may hold when a destructor calls
        return _loop
    with _lock:
        if _loop is None:
            loop = _Loop()
            _thread = threading.Thread(
                target=loop.run_forever, name="cellfeed-requests", daemon=True
            )
            _thread.start()
            _loop = loop
        return _loop


@atexit.register
def _end() -> None:
    """Cancel pending requests, before Python stops the thread at an arbitrary point."""
    loop, thread = _loop, _thread
    if loop is None or thread is None or _process != os.getpid():
        return

    latest = time.monotonic() + _END_SECONDS

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(stop)

    def stop() -> None:
        # Threads of obstore that return to a finalized interpreter would print errors.
        if loop.held and time.monotonic() < latest:
            loop.call_later(_END_STEP_SECONDS, stop)
        else:
            loop.stop()

    loop.call_soon_threadsafe(cancel)
    thread.join(timeout=5)
    if not thread.is_alive():
        loop.close()


def open_object(location: Location) -> Version:
    """Ask for the version of an object.

    Raises
    ------
    PathError
        There is no such object.
    RemoteError
        The server cannot be reached, or refuses the request.
    """
    stores, path = stores_of(location)

    async def ask() -> Version:
        with errors_named(location):
            return version_of(await stores.store.head_async(path))

    return answer_of(location, ask())


def answer_of(location: Location, asking: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Run a request in the loop, and wait for its result; Ctrl-C cancels it.

    Raises
    ------
    RemoteError
        Nobody needs the result any more.
    """
    future = asyncio.run_coroutine_threadsafe(asking, _started())
    try:
        while not wait([future], LOOK_UP_SECONDS).done:
            if is_cancelled():
                raise cancelled(location)
        return future.result()
    except CancelledError:  # the process is exiting
        raise cancelled(location) from None
    finally:
        future.cancel()


def answers_of(
    location: Location, asking: Sequence[Callable[[], Coroutine[Any, Any, _Answer]]]
) -> list[_Answer]:
    """Run several requests, 32 at a time, and wait for all results; see `answer_of`."""

    async def run() -> list[_Answer]:
        turns = asyncio.Semaphore(_MOST_AT_ONCE)

        async def in_turn(ask: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer:
            async with turns:
                return await ask()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(in_turn(ask)) for ask in asking]
        return [task.result() for task in tasks]

    try:
        return answer_of(location, run())
    except* CellfeedError as errors:
        raise errors.exceptions[0] from None


_MOST_AT_ONCE = 32


@contextmanager
def errors_named(
    location: Location, first: int | None = None, stop: int | None = None
) -> Iterator[None]:
    """Replace the error of a request; see `failure`.

    Raises
    ------
    CellfeedError
        The server does not answer; names the object, and the bytes.
    """
    try:
        yield
    except CellfeedError:
        raise
    except Exception as error:
        if not is_of_request(error):  # but of our own code
            raise
        raise failure(error, location, first, stop) from None


# Errors of servers, and how messages describe them.

_STATUS = re.compile(r"status code: (\d{3}[ A-Za-z-]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"(?:Code|code|error)\": *\"(\w+)\"")
_CAUSES = {  # in what obstore adds for developers
    "TimedOut": (
        "no answer in time; raise the limit in `client_options` (`read_timeout`, `timeout`)"
    ),
    "kind: Timeout": (
        "no answer in time; raise the limit in `client_options` (`read_timeout`, `timeout`)"
    ),
    "dns error": "its host name is unknown",
    "ConnectionRefused": "the connection is refused",
    "ConnectionReset": "the connection was reset",
    "UnexpectedEof": "the connection was closed in the middle of the answer",
    "IncompleteMessage": "the connection was closed before an answer",
    "TooManyRedirects": "it redirects in a circle",
    "InvalidContentType": "it does not speak TLS; is the URL `http://`?",
    "BadScheme": "it redirects to an unencrypted URL",
    "invalid peer certificate": "its certificate is not valid",
}
_MAY_PASS = (408, 425, 429)
_PAST_THE_END = 416
_SERVER_ERRORS = 500
_CLIENT_ERRORS = 400


def is_of_server(error: BaseException) -> bool:
    """Return whether an error was raised by obstore."""
    return type(error).__module__.startswith("obstore")


def is_of_request(error: BaseException) -> bool:
    """Return whether an error is of a connection, a server or its answer, not of our own code."""
    # obstore raises `FileNotFoundError` where there is no such object.
    of_request = ConnectionError, TimeoutError, FileNotFoundError
    return is_of_server(error) or isinstance(error, of_request)


def failure(
    error: BaseException, location: Location, first: int | None = None, stop: int | None = None
) -> CellfeedError:
    """Return the exception that replaces an error of a request: one line with place and remedy.

    Parameters
    ----------
    error
        An error for which `is_of_request` is true.
    location
        The object.
    first, stop
        The requested bytes, if it was a range.
    """
    where = str(location) if first is None else f"{location} (bytes {first} to {stop})"
    kind, found = type(error).__name__, _STATUS.search(str(error))
    status = int(found[1][:3]) if found else None
    if status == _PAST_THE_END:
        return FormatError(f"{where}: {_REPLACED}")
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError":
        return PathError(f"{where}: there is no such object; check the URL")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        what = f"the server refuses it ({_said(error) or 'no credentials'})"
        remedy = "give valid credentials in `storage_options`, or renew those that expired"
    elif kind == "NotSupportedError" and first is not None:
        what, remedy = "the server returns no byte ranges", "download it, or use another server"
    elif status in range(_CLIENT_ERRORS, _SERVER_ERRORS) and status not in _MAY_PASS:
        what = f"the server refuses it ({_said(error)})"
        remedy = "check the URL and `storage_options`; renew credentials that expired"
    else:
        what = f"the server does not return it ({_said(error)})"
        remedy = "check that it can be reached, and try again"
    return RemoteError(f"{where}: {what}; {remedy}")


def _said(error: BaseException) -> str:
    """Return the server's answer, or why there is none, without secrets that it may repeat.

    The text of an answer may repeat parts of the request, such as credentials, so only an error
    code is taken from it.
    """
    line, _, details = str(error).partition("\n")
    found = _STATUS.search(line)
    if found is not None:
        code = _CODE.search(str(error))
        return found[1].strip() + (f": {code[1] or code[2]}" if code else "")
    cause = next((words for sign, words in _CAUSES.items() if sign in details), None)
    if cause is not None:
        return cause
    said = re.sub(r"^Generic \w+ error: ", "", line.rpartition(" - ")[2])
    said = re.sub(r"https?://\S+", "", said)  # the message names it already, and it may be signed
    return " ".join(said.split())[:160]


def cancelled(location: Location) -> RemoteError:
    """Return the exception that is raised if reading is cancelled."""
    return RemoteError(
        f"{location}: reading was cancelled, since nothing waits for it; read it again"
    )


# What a URL refers to, versions of the objects in a folder, and zarr groups.

_MAGIC = re.compile(r"[*?\[]")
_ZARR = {"zarr.json", ".zgroup"}  # present in a folder that is a zarr group
_LISTED_AT_ONCE = 1000


def zarr_store(location: Location) -> tuple[Any, str]:
    """Return the zarr store that contains a group, and the path of the group in it.

    Raises
    ------
    CellfeedError
        As `object_store`.
    """
    storage: Any = importlib.import_module("zarr.storage")  # zarr is slow to import
    stores, path = stores_of(location)
    return storage.ObjectStore(stores.store, read_only=True), path


def expand_url(location: Location, suffixes: Sequence[str]) -> list[Location]:
    """Return the objects that a URL refers to: itself, its folder's, or those matching its pattern.

    ``*`` and ``?`` match within a name, ``**`` matches any number of folders, ``[ab]`` one of
    several characters.

    Parameters
    ----------
    location
        A URL; one that ends with a slash, or with none of ``suffixes``, is a folder.
    suffixes
        Suffixes of names that can be opened.

    Raises
    ------
    PathError
        Nothing is found, or the server does not support listing.
    RemoteError
        The server cannot be reached, or refuses the request.
    """
    split_url(location)
    pattern = _MAGIC.search(location.text)
    whole = replace(location, text=location.text.rstrip("/"))
    is_web = location.scheme in WEB
    if pattern is None and (is_web or (whole == location and has_suffix(whole.text, *suffixes))):
        return [whole]
    if is_web:
        msg = f"{location}: a web server cannot list files; give the URL of each file"
        raise PathError(msg)
    if pattern is None:
        what = f"has nothing that can be opened ({', '.join(suffixes)})"
        below = _listed(whole)
        if not _ZARR.isdisjoint(below):
            return [whole]
        names = {name.partition("/")[0] for name in below if not name.startswith(".")}
        found = [whole / name for name in sorted(names) if has_suffix(name, *suffixes)]
    else:
        what = "matches nothing"
        folder = replace(location, text=whole.text[: pattern.start()].rpartition("/")[0])
        wanted = re.compile(_regular_expression(whole.text[len(folder.text) + 1 :]))
        matches = map(wanted.match, _listed(folder))
        found = [folder / name for name in sorted({each[0] for each in matches if each})]
    if not found:
        raise PathError(f"{location}: {what}; check the URL")
    return found


def versions_below(folder: Location, most: int) -> dict[str, Version] | None:
    """Return the versions of the objects in a folder by name; None if they cannot be listed.

    Parameters
    ----------
    folder
        A folder.
    most
        Maximum number of objects; if there are more, returns None.
    """
    if folder.scheme in WEB:
        return None
    found = _listed(folder, most)
    return None if len(found) > most else found


def versions_of(folder: Location, names: Sequence[str]) -> dict[str, Version]:
    """Return the versions of the objects that exist, requesting many at a time."""
    stores, prefix = stores_of(folder)

    async def ask(name: str) -> Version | None:
        try:
            with errors_named(folder / name):
                return version_of(await stores.store.head_async(f"{prefix}/{name}"))
        except PathError:
            return None

    found = zip(names, answers_of(folder, [partial(ask, name) for name in names]), strict=True)
    return {name: version for name, version in found if version is not None}


def _regular_expression(pattern: str) -> str:
    """Return what matches the shortest path that fits: a zarr store is a folder of objects."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    # Names that begin with a dot only match if that is written, as in folders on disk.
    shown = r"(?!(?<![^/])\.)"
    every = f"(?:{shown}.)*?"
    meanings = {"**/": f"(?:{every}/)??", "**": every}
    meanings |= {"*": f"{shown}[^/]*", "?": f"{shown}[^/]"}
    written = (
        meanings.get(part, part if part.startswith("[") else re.escape(part)) for part in parts
    )
    return f"{''.join(written)}(?=/|\\Z)"


def _listed(folder: Location, most: int | None = None) -> dict[str, Version]:
    """Return the versions of all objects in a folder, or of more than ``most``, by name."""
    stores, prefix = stores_of(folder)
    start = len(prefix) + 1 if prefix else 0

    async def ask() -> dict[str, Version]:
        found = dict[str, Version]()
        with errors_named(folder):
            async for page in stores.store.list(prefix or None, chunk_size=_LISTED_AT_ONCE):
                found |= {meta["path"][start:]: version_of(meta) for meta in page}
                if most is not None and len(found) > most:
                    break
        return found

    return answer_of(folder, ask())
