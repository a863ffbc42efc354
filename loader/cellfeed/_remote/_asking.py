"""Requests to a server, with retries where they may help."""

import asyncio
import atexit
import concurrent.futures
import importlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from cellfeed._bytes import Location, is_awaited
from cellfeed._errors import CellfeedError
from cellfeed._remote._failures import given_up
from cellfeed._remote._loop import GivenUpError, from_loop, result_of
from cellfeed._remote._opening import Version, object_store, version_of
from cellfeed._remote._retrying import Attempts

__all__ = ["answer_of", "ask_in_loop", "ask_in_thread", "open_object", "zarr_store"]

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
