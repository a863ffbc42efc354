"""Requests to a server, with retries where they may help."""

import asyncio
import atexit
import concurrent.futures
import importlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from cellfeed._bytes._location import Location
from cellfeed._bytes._remote._failures import Attempts, given_up
from cellfeed._bytes._remote._loop import GivenUpError, from_loop, result_of
from cellfeed._bytes._remote._opening import WEB, Version, check_url, object_store, version_of
from cellfeed._bytes._store import is_awaited
from cellfeed._errors import CellfeedError, PathError

_Answer = TypeVar("_Answer")

_LEAVING_SECONDS = 1.0  # that the process may take to exit


def open_object(location: Location) -> Version:
    """Ask for the version of an object.

    Raises
    ------
    The object does not exist.
        There is no such object.
    RemoteError
        The server cannot be reached, or refuses the request.
    """
    store, path = object_store(location)
    return version_of(answer_of(location, ask_in_loop(location, lambda: store.head_async(path))))


def answer_of(location: Location, asking: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Wait for the result of `ask_in_loop`, as long as somebody needs it.

    Raises
    ------
    CellfeedError
        As `ask_in_loop`; `RemoteError` if nobody needs the result any more.
    """
    try:
        return result_of(asking)
    except GivenUpError:
        raise given_up(location) from None


async def ask_in_loop(
    location: Location,
    ask: Callable[[], Awaitable[_Answer]],
    first: int | None = None,
    stop: int | None = None,
) -> _Answer:
    """Send a request to a server, with retries where they may help.

    Raises
    ------
    CellfeedError
        The server does not answer; names the object, and the bytes from ``first`` to ``stop``.
    """
    attempts = Attempts(location, first, stop)
    while True:
        try:
            return await ask()
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever obstore raises
            pause = attempts.pause_after(error)
        await asyncio.sleep(pause)


def ask_in_thread(location: Location, ask: Callable[[], _Answer], first: int, stop: int) -> _Answer:
    """Send a request in the calling thread, and run no other Python code meanwhile.

    Raises
    ------
    CellfeedError
        The server does not answer; names the object, and the bytes from ``first`` to ``stop``.
    """
    attempts = Attempts(location, first, stop)
    while True:
        try:
            return ask()
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever obstore raises
            pause = attempts.pause_after(error)
        if not is_awaited():
            raise given_up(location)
        time.sleep(pause)


def zarr_store(location: Location) -> tuple[Any, str]:
    """Return the zarr store that contains a group, and the path of the group in it.

    Raises
    ------
    CellfeedError
        As `object_store`.
    """
    store, path = object_store(location)
    root = Location(location.text[: len(location.text.rstrip("/")) - len(path)], location.options)
    return _asking_again()(store, root), path


@cache
def _asking_again() -> Any:
    base: Any = importlib.import_module("zarr.storage").ObjectStore  # zarr is slow to import
    atexit.register(_end_requests_of_zarr)  # before zarr ends its loop, which came earlier

    class Objects(base):  # type: ignore[misc]
        """Objects that zarr reads, with retries where they may help."""

        def __init__(self, store: Any, root: Location) -> None:
            super().__init__(store, read_only=True)
            self._root = root

        async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
            get = super().get
            return await from_loop(
                ask_in_loop(self._root / key, lambda: get(key, *arguments, **options))
            )

        async def exists(self, key: str) -> bool:
            exists = super().exists
            found: bool = await from_loop(ask_in_loop(self._root / key, lambda: exists(key)))
            return found

    return Objects


def _end_requests_of_zarr() -> None:
    """Cancel zarr's pending requests after Ctrl-C, about which asyncio would complain otherwise."""
    loop = importlib.import_module("zarr.core.sync").loop[0]
    if loop is None or not loop.is_running():
        return

    async def cancel() -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_LEAVING_SECONDS)

    with suppress(concurrent.futures.TimeoutError):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(2 * _LEAVING_SECONDS)


# Expanding folders and patterns of object stores.

_MAGIC = re.compile(r"[*?\[]")
_ZARR = {"zarr.json", ".zgroup"}  # present in a folder that is a zarr group
_MOST_AT_ONCE = 1000
_MOST_ASKED = 32


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
    check_url(location)
    pattern = _MAGIC.search(location.text)
    text = location.text.rstrip("/")
    if pattern is None and text.endswith(tuple(suffixes)) and text == location.text:
        return [location]
    if location.scheme in WEB:
        if pattern is None:
            return [replace(location, text=text)]  # whatever its name
        msg = f"{location}: a web server cannot list files; give the URL of each file"
        raise PathError(msg)
    if pattern is None:
        found = _in_folder(replace(location, text=text), suffixes)
        if not found:
            names = ", ".join(suffixes)
            msg = f"{location}: has nothing that can be opened ({names}); check the URL"
            raise PathError(msg)
        return found
    found = _matches(replace(location, text=text), pattern.start())
    if not found:
        msg = f"{location}: matches nothing; check the URL"
        raise PathError(msg)
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
    store, prefix = object_store(folder)

    async def ask() -> dict[str, Version]:
        pages, found = store.list(prefix, chunk_size=_MOST_AT_ONCE), dict[str, Version]()
        async for page in pages:
            found |= {meta["path"][len(prefix) + 1 :]: version_of(meta) for meta in page}
            if len(found) > most:
                break
        return found

    found = answer_of(folder, ask_in_loop(folder, ask))
    return None if len(found) > most else found


def versions_of(folder: Location, names: Sequence[str]) -> dict[str, Version]:
    """Return the versions of the objects that exist, requesting many at a time."""
    store, prefix = object_store(folder)

    async def ask(name: str, turns: asyncio.Semaphore) -> Version | None:
        try:
            async with turns:
                meta = await ask_in_loop(
                    folder / name, lambda: store.head_async(f"{prefix}/{name}")
                )
        except PathError:
            return None
        return version_of(meta)

    async def ask_all() -> list[Version | None]:
        turns = asyncio.Semaphore(_MOST_ASKED)
        async with asyncio.TaskGroup() as asking:
            tasks = [asking.create_task(ask(name, turns)) for name in names]
        return [task.result() for task in tasks]

    try:
        found = zip(names, answer_of(folder, ask_all()), strict=True)
    except* CellfeedError as errors:
        raise errors.exceptions[0] from None
    return {name: version for name, version in found if version is not None}


def _in_folder(location: Location, suffixes: Sequence[str]) -> list[Location]:
    below = _names_below(location)
    if not _ZARR.isdisjoint(below):
        return [location]
    names = {name.partition("/")[0] for name in below}
    return [location / name for name in sorted(names) if name.endswith(tuple(suffixes))]


def _matches(location: Location, first: int) -> list[Location]:
    folder, _, _ = location.text[:first].rpartition("/")
    rest = location.text[len(folder) + 1 :]
    below = replace(location, text=folder)
    matches = set[str]()
    wanted = re.compile(_regular_expression(rest))
    for name in _names_below(below):
        parts = name.split("/")
        # A zarr store is a folder of objects, which matches as a whole.
        candidates = ("/".join(parts[: k + 1]) for k in range(len(parts)))
        found = next((each for each in candidates if wanted.fullmatch(each)), None)
        if found is not None:
            matches.add(found)
    return [below / name for name in sorted(matches)]


def _regular_expression(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        meanings.get(part, part if part.startswith("[") else re.escape(part)) for part in parts
    )


def _names_below(location: Location) -> list[str]:
    """Return the names of all objects below a folder, relative to it."""
    store, prefix = object_store(location)

    async def ask() -> list[str]:
        pages = store.list(prefix or None, chunk_size=_MOST_AT_ONCE)
        return [meta["path"] async for page in pages for meta in page]

    start = len(prefix) + 1 if prefix else 0
    return [path[start:] for path in answer_of(location, ask_in_loop(location, ask))]
