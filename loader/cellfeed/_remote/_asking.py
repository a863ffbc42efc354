"""Questions to a server, asked again where that may help."""

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar

from cellfeed._bytes import Location
from cellfeed._errors import CellfeedError
from cellfeed._remote._failures import failure
from cellfeed._remote._loop import result_of
from cellfeed._remote._opening import Version, object_store, version_of
from cellfeed._remote._retrying import Retries

__all__ = ["ask_in_loop", "ask_in_thread", "open_object", "zarr_store"]

_Answer = TypeVar("_Answer")


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
    return version_of(result_of(ask_in_loop(location, lambda: store.head_async(path))))


async def ask_in_loop(location: Location, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Ask a server, again where that may help.

    Raises
    ------
    CellfeedError
        It does not answer; names the object.
    """
    retries, began, n = Retries.of(location), time.monotonic(), 0
    while True:
        n += 1
        try:
            return await ask()
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever obstore raises
            pause = retries.pause_after(error, n, time.monotonic() - began)
            if pause is None:
                raise failure(error, location) from None
        await asyncio.sleep(pause)


def ask_in_thread(location: Location, ask: Callable[[], _Answer], first: int, stop: int) -> _Answer:
    """Ask a server in the calling thread, and run no other Python code meanwhile.

    Raises
    ------
    CellfeedError
        It does not answer; names the object, and the bytes from ``first`` to ``stop``.
    """
    retries, began, n = Retries.of(location), time.monotonic(), 0
    while True:
        n += 1
        try:
            return ask()
        except CellfeedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever obstore raises
            pause = retries.pause_after(error, n, time.monotonic() - began)
            if pause is None:
                raise failure(error, location, first, stop) from None
        time.sleep(pause)


def zarr_store(location: Location) -> tuple[Any, str]:
    """Return a store of zarr that a group is in, and its path there.

    Raises
    ------
    CellfeedError
        As of `object_store`.
    """
    store, path = object_store(location)
    root = Location(location.text[: len(location.text.rstrip("/")) - len(path)], location.options)
    return _asking_again()(store, root), path


@cache
def _asking_again() -> Any:
    base: Any = importlib.import_module("zarr.storage").ObjectStore  # zarr is slow to import

    class Objects(base):  # type: ignore[misc]
        """Objects that zarr reads, asked for again where that may help."""

        def __init__(self, store: Any, root: Location) -> None:
            super().__init__(store, read_only=True)
            self._root = root

        async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
            return await ask_in_loop(
                self._root / key, lambda: super(Objects, self).get(key, *arguments, **options)
            )

        async def exists(self, key: str) -> bool:
            found: bool = await ask_in_loop(
                self._root / key, lambda: super(Objects, self).exists(key)
            )
            return found

    return Objects
