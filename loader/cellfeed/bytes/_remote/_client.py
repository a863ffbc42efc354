"""Connections to servers: the store of a URL, requests with retries, and errors.

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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
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
from cellfeed.bytes._location import Location, StorageOptions
from cellfeed.bytes._store import LOOK_UP_SECONDS, is_cancelled

_Answer = TypeVar("_Answer")

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

    def check(self, answer: Any) -> None:
        """Check that an answer of obstore, its result of a ``get``, is of this version.

        Raises
        ------
        ChangedError
            It is of another version.
        EncodedError
            It seems to be of another version, since the server compresses it.
        """
        found = version_of(answer.meta)
        has_etags = self.etag is not None and found.etag is not None
        is_same = self.etag == found.etag if has_etags else self.modified == found.modified
        if self.size != found.size or not is_same:
            raise _encoded(answer) or ChangedError()


def check_length(answer: Any, content: memoryview, n_requested: int) -> None:
    """Check that an answer of obstore has as many bytes as were requested.

    Raises
    ------
    LengthError
        It has more or fewer.
    EncodedError
        It has, since the server compresses it.
    """
    if len(content) != n_requested:
        raise _encoded(answer) or LengthError(len(content), n_requested)


def _encoded(answer: Any) -> "EncodedError | None":
    encoding = answer.attributes.get("Content-Encoding")
    return EncodedError(encoding) if encoding else None


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
    root, path = _parted(location)
    with _opening:
        opened = _opened.setdefault(location.options, {})
        if root not in opened:
            opened[root] = Stores(
                _store(location, root, _CLIENT), _store(location, root, _BLOCKING)
            )
        return opened[root], path


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


async def from_loop(coroutine: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Run a coroutine in this loop, and await its result from a coroutine of another loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, _started()))


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


# How often a request is retried, and after which pauses.

_RETRIES = 5
_FIRST_PAUSE, _LONGEST_PAUSE, _LIMIT = 0.1, 60.0, 180.0  # in seconds; no attempt after the limit
_FACTOR = 3.0  # by which pauses grow
_OVERLOAD_FACTOR = 5


class _Retries:
    """The retries of one request.

    Pauses between them are 0.1 s, 0.3 s, 0.9 s and so on, unless the user sets others in obstore's
    ``retry_config``. An overloaded server gets pauses five times as long: a minute in total.
    obstore does not expose the headers of an error, so ``Retry-After`` is not known here.

    Parameters
    ----------
    location
        The object.
    first, stop
        The requested bytes, if it is a range; for messages.
    """

    def __init__(
        self, location: Location, first: int | None = None, stop: int | None = None
    ) -> None:
        self._where = location, first, stop
        given = location.options.values.get("retry_config") or {}
        pauses = given.get("backoff") or {}
        self._most = 1 + int(given.get("max_retries", _RETRIES))
        self._pause = _seconds(pauses.get("init_backoff"), _FIRST_PAUSE)
        self._longest_pause = _seconds(pauses.get("max_backoff"), _LONGEST_PAUSE)
        self._factor = float(pauses.get("base", _FACTOR))
        self._end = time.monotonic() + _seconds(given.get("retry_timeout"), _LIMIT)
        self._n = 0

    def pause_after(self, error: BaseException) -> float:
        """Return how long to wait before the next attempt, in seconds, after a failed one.

        Raises
        ------
        CellfeedError
            There are no attempts left; names the object, and the bytes.
        Exception
            The error itself, if it is of our own code.
        """
        if not is_of_request(error):
            raise error
        self._n += 1
        if self._n >= self._most or time.monotonic() >= self._end or not may_pass(error):
            raise failure(error, *self._where) from None
        pause = self._pause * (_OVERLOAD_FACTOR if is_overload(error) else 1)
        self._pause *= self._factor
        return min(pause, self._longest_pause)


def _seconds(given: Any, otherwise: float) -> float:
    return given.total_seconds() if isinstance(given, timedelta) else otherwise


def open_object(location: Location) -> Version:
    """Ask for the version of an object.

    Raises
    ------
    PathError
        There is no such object.
    RemoteError
        The server cannot be reached, or refuses the request.
    """
    store, path = object_store(location)
    return version_of(answer_of(location, ask_in_loop(location, lambda: store.head_async(path))))


def answer_of(location: Location, asking: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Run `ask_in_loop` and wait for its result, as long as somebody needs it; Ctrl-C cancels it.

    Raises
    ------
    CellfeedError
        As `ask_in_loop`; `RemoteError` if nobody needs the result any more.
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
    """Run several of `ask_in_loop`, 32 at a time, and wait for all results; see `answer_of`."""

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


async def ask_in_loop(
    location: Location,
    ask: Callable[[], Awaitable[_Answer]],
    first: int | None = None,
    stop: int | None = None,
    before_retry: Callable[[BaseException], None] | None = None,
) -> _Answer:
    """Send a request to a server, with retries where they may help.

    Parameters
    ----------
    location
        The object.
    ask
        Sends the request.
    first, stop
        The requested bytes, if it is a range; for messages.
    before_retry
        Called with the error of an attempt that is not the last.

    Raises
    ------
    CellfeedError
        The server does not answer; names the object, and the bytes.
    """
    retries = _Retries(location, first, stop)
    while True:
        try:
            return await ask()
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever obstore raises
            pause = retries.pause_after(error)
            if before_retry is not None:
                before_retry(error)
        await asyncio.sleep(pause)


def ask_in_thread(location: Location, ask: Callable[[], _Answer], first: int, stop: int) -> _Answer:
    """Send a request in the calling thread, and run no other Python code meanwhile.

    Raises
    ------
    CellfeedError
        The server does not answer; names the object, and the bytes from ``first`` to ``stop``.
    """
    retries = _Retries(location, first, stop)
    while True:
        try:
            return ask()
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever obstore raises
            pause = retries.pause_after(error)
        if is_cancelled():
            raise cancelled(location)
        time.sleep(pause)


# Errors of servers: whether they may pass, and how messages describe them.

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
_OVERLOADED = (429, 503)
_MAY_PASS = (408, 425, 429)
_PAST_THE_END = 416
_SERVER_ERRORS = 500
_CLIENT_ERRORS = 400
_FINAL = (
    "NotFoundError",
    "FileNotFoundError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "PreconditionError",
    "InvalidPathError",
    "NotSupportedError",
    "UnknownConfigurationKeyError",
)


class AnswerError(Exception):
    """An answer is not what was requested."""


class ChangedError(AnswerError):
    """An object has changed since it was opened."""


class EncodedError(AnswerError):
    """A server compresses what it sends, so that ranges are not those of the object.

    Parameters
    ----------
    encoding
        Its ``Content-Encoding``.
    """


class LengthError(AnswerError):
    """A server returned more or fewer bytes than were requested.

    Parameters
    ----------
    n_bytes, n_requested
        Numbers of bytes that came, and that were requested.
    """


def is_of_server(error: BaseException) -> bool:
    """Return whether an error was raised by obstore."""
    return type(error).__module__.startswith("obstore")


def is_of_request(error: BaseException) -> bool:
    """Return whether an error is of a connection, a server or its answer, not of our own code."""
    # obstore raises `FileNotFoundError` where there is no such object.
    of_request = AnswerError, ConnectionError, TimeoutError, FileNotFoundError
    return is_of_server(error) or isinstance(error, of_request)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error of obstore, None if it contains none."""
    found = _STATUS.search(str(error))
    return int(found[1][:3]) if found else None


def is_missing(error: BaseException) -> bool:
    """Return whether the error means that the object does not exist."""
    return isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"


def is_overload(error: BaseException) -> bool:
    """Return whether the server asks for fewer requests."""
    return _status_of(error) in _OVERLOADED


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, AnswerError):
        return isinstance(error, LengthError)
    if not is_of_request(error) or type(error).__name__ in _FINAL:
        return False
    status = _status_of(error)
    is_final = status is not None and _CLIENT_ERRORS <= status < _SERVER_ERRORS
    return not is_final or status in _MAY_PASS


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
    where = str(location)
    if first is not None:
        where += f" (bytes {first} to {stop})" if stop is not None else f" (from byte {first})"
    kind, status = type(error).__name__, _status_of(error)
    if isinstance(error, ChangedError) or status == _PAST_THE_END:
        msg = f"{where}: was replaced or written to since it was opened; open it again"
        return FormatError(msg)
    if is_missing(error):
        return PathError(f"{where}: there is no such object; check the URL")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        what = f"the server refuses it ({_said(error) or 'no credentials'})"
        remedy = "give valid credentials in `storage_options`, or renew those that expired"
    elif kind == "NotSupportedError" and first is not None:
        what, remedy = "the server returns no byte ranges", "download it, or use another server"
    elif isinstance(error, LengthError):
        n_bytes, n_requested = error.args
        what = f"the server returned {n_bytes:,} bytes, not {n_requested:,}"
        remedy = "upload it again if that persists"
    elif isinstance(error, EncodedError):
        what = f"the server compresses it (Content-Encoding: {error.args[0]}), also byte ranges"
        remedy = "turn that off for such files"
    elif status is not None and _CLIENT_ERRORS <= status < _SERVER_ERRORS and not may_pass(error):
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
