"""Expanding folders and patterns of object stores."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace

from cellfeed._bytes import Location
from cellfeed._errors import CellfeedError, PathError
from cellfeed._remote._asking import answer_of, ask_in_loop
from cellfeed._remote._opening import Version, check_url, object_store, version_of

__all__ = ["expand_url", "versions_below", "versions_of"]

_MAGIC = re.compile(r"[*?\[]")
_WEB = ("http", "https")
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
    if location.scheme in _WEB:
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
    if folder.scheme in _WEB:
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
