"""Finding objects: what a URL refers to, versions of the objects in a folder, and zarr groups."""

import asyncio
import atexit
import concurrent.futures
import importlib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from cellfeed._errors import PathError
from cellfeed.bytes._location import Location, has_suffix
from cellfeed.bytes._remote._client import (
    WEB,
    Version,
    answer_of,
    answers_of,
    ask_in_loop,
    check_url,
    from_loop,
    object_store,
    version_of,
)
from cellfeed.bytes._store import LOOK_UP_SECONDS

_LEAVING_SECONDS = 1.0  # that the process may take to exit


def zarr_store(location: Location) -> tuple[Any, str]:
    """Return the zarr store that contains a group, and the path of the group in it.

    Raises
    ------
    CellfeedError
        As `object_store`.
    """
    store, path = object_store(location)
    root = Location(location.text[: len(location.text.rstrip("/")) - len(path)], location.options)
    return _retrying_store()(store, root), path


@cache
def _retrying_store() -> Any:
    base: Any = importlib.import_module("zarr.storage").ObjectStore  # zarr is slow to import
    atexit.register(_end_requests_of_zarr)  # before zarr ends its loop, which came earlier
    _let_zarr_look_up(importlib.import_module("zarr.core.sync"))

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


def _let_zarr_look_up(sync: Any) -> None:
    """Make zarr wait for its requests in steps.

    Python misses a Ctrl-C that arrives just before the main thread waits for a lock, and zarr would
    wait as long as the server does.
    """
    wait = sync.wait

    def wait_in_steps(futures: Any, timeout: float | None = None, **options: Any) -> Any:
        while timeout is None:
            waited = wait(futures, LOOK_UP_SECONDS, **options)
            if not waited.not_done:
                return waited
        return wait(futures, timeout, **options)

    sync.wait = wait_in_steps


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
    if pattern is None and has_suffix(text, *suffixes) and text == location.text:
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
    found = _listed(folder, most)
    return None if len(found) > most else found


def versions_of(folder: Location, names: Sequence[str]) -> dict[str, Version]:
    """Return the versions of the objects that exist, requesting many at a time."""
    store, prefix = object_store(folder)

    async def ask(name: str) -> Version | None:
        try:
            meta = await ask_in_loop(folder / name, lambda: store.head_async(f"{prefix}/{name}"))
        except PathError:
            return None
        return version_of(meta)

    found = zip(names, answers_of(folder, [partial(ask, name) for name in names]), strict=True)
    return {name: version for name, version in found if version is not None}


def _in_folder(location: Location, suffixes: Sequence[str]) -> list[Location]:
    below = _listed(location)
    if not _ZARR.isdisjoint(below):
        return [location]
    names = {name.partition("/")[0] for name in below if not name.startswith(".")}
    return [location / name for name in sorted(names) if has_suffix(name, *suffixes)]


def _matches(location: Location, first: int) -> list[Location]:
    folder, _, _ = location.text[:first].rpartition("/")
    below = replace(location, text=folder)
    matches = set[str]()
    wanted = re.compile(_regular_expression(location.text[len(folder) + 1 :]))
    for name in _listed(below):
        parts = name.split("/")
        # A zarr store is a folder of objects, which matches as a whole.
        candidates = ("/".join(parts[: k + 1]) for k in range(len(parts)))
        found = next((each for each in candidates if wanted.fullmatch(each)), None)
        if found is not None:
            matches.add(found)
    return [below / name for name in sorted(matches)]


def _regular_expression(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    # Names that begin with a dot only match if that is written, as in folders on disk.
    shown = r"(?!(?<![^/])\.)"
    every = f"(?:{shown}.)*"
    meanings = {"**/": f"(?:{every}/)?", "**": every}
    meanings |= {"*": f"{shown}[^/]*", "?": f"{shown}[^/]"}
    return "".join(
        meanings.get(part, part if part.startswith("[") else re.escape(part)) for part in parts
    )


def _listed(folder: Location, most: int | None = None) -> dict[str, Version]:
    """Return the versions of all objects in a folder, or of more than ``most``, by name."""
    store, prefix = object_store(folder)
    start = len(prefix) + 1 if prefix else 0

    async def ask() -> dict[str, Version]:
        found = dict[str, Version]()
        async for page in store.list(prefix or None, chunk_size=_MOST_AT_ONCE):
            found |= {meta["path"][start:]: version_of(meta) for meta in page}
            if most is not None and len(found) > most:
                break
        return found

    return answer_of(folder, ask_in_loop(folder, ask))
