"""A web server over a folder, for tests: with everything that it was asked, and faults on request.

``WebServer(folder)`` runs in a thread of the tests; ``WebServer.in_process(folder)`` in a process
of its own, for benchmarks, without faults and records.
"""

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from tests.servers.answers import Request
from tests.servers.faults import Fault
from tests.servers.processes import ModuleProcess, listening
from tests.servers.serving import Serving

__all__ = ["Request", "WebServer"]


_started = set["WebServer"]()


class WebServer:
    """Serve a folder over HTTP/1.1 on loopback.

    Meanwhile, garbage is collected after each test only. If the server's thread collected h5py's
    objects, it would wait for h5py's lock, which a test holds that waits for the server.

    Parameters
    ----------
    folder
        What is served.
    answer
        Called with each `Request` before it is answered; returns what is to go wrong, or None. It
        may be replaced at any time, and must not block: that is what `Held` and `Hang` are for.

    Attributes
    ----------
    url
        Without a slash at the end.
    requests
        Every request, in the order in which they came.
    """

    def __init__(
        self, folder: Path, answer: Callable[[Request], Fault | None] | None = None
    ) -> None:
        self._folder = folder
        self.answer = answer
        self.requests: list[Request] = []
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        _started.add(self)
        gc.disable()
        self._listener, port = listening()
        self.url = f"http://127.0.0.1:{port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection, also those of requests that hang."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
            self._thread = None
            _started.discard(self)
            if not _started:
                gc.enable()

    def replace(self, path: str, content: bytes) -> None:
        """Put another file in the place of one, in one step; the ETag is another one then."""
        place = self._folder / path
        new = place.with_name(f".{place.name}.new")
        new.write_bytes(content)
        before = place.stat().st_mtime_ns if place.exists() else 0
        modified = max(time.time_ns(), before + 1)
        os.utime(new, ns=(modified, modified))
        new.replace(place)

    @staticmethod
    @contextlib.contextmanager
    def in_process(folder: Path) -> Iterator[str]:
        """Serve a folder in a process of its own; gives the URL."""
        process = ModuleProcess("tests.servers.serving", str(folder.resolve()))
        try:
            yield f"http://127.0.0.1:{int(process.line())}"
        finally:
            process.close()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        serving = Serving(self._folder, self._fault, self.requests.append)
        task = asyncio.ensure_future(serving.run(self._listener))
        self._ready.set()
        await self._closing.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _fault(self, request: Request) -> Fault | None:
        return None if self.answer is None else self.answer(request)
