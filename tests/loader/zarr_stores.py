"""How are small zarr stores written quickly? In memory, in this thread, and then file by file.

zarr hands each file and each chunk to another thread and waits for it, which takes most of the
time of a test that writes many of them. The files are the same.
"""

import asyncio
import atexit
import functools
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import zarr.core.sync
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

__all__ = ["in_this_thread", "written_at_once"]


@contextmanager
def written_at_once(path: Path) -> Iterator[MemoryStore]:
    """Take a store, and write what it holds then as files in a folder of its own."""
    files = dict[str, Buffer]()
    with in_this_thread():
        yield MemoryStore(files)
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.to_bytes())


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Let zarr do here what it hands to its own threads; calls of other threads are as ever."""
    loop, here = _loop(), threading.get_ident()

    def wait_for(coroutine: Coroutine[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != here:
            return _SYNC(coroutine, *arguments, **options)
        return loop.run_until_complete(coroutine)

    with ExitStack() as stack:
        for module in _callers():
            stack.enter_context(mock.patch.object(module, "sync", wait_for))
        yield


@functools.cache
def _callers() -> list[ModuleType]:
    """Return the modules of zarr that call `zarr.core.sync.sync`, of those imported by now."""
    modules = [each for name, each in sys.modules.items() if name.startswith("zarr.")]
    return [each for each in modules if vars(each).get("sync") is _SYNC]


_SYNC = zarr.core.sync.sync


class _Here(ThreadPoolExecutor):
    """Does what is submitted at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            done.set_exception(error)
        return done


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_Here())
    atexit.register(loop.close)
    return loop
