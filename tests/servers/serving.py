"""How does a folder reach clients over HTTP/1.1? An asyncio server; as a module, a process of it.

``python -m tests.servers.serving FOLDER`` writes its port, and serves until its input ends.
"""

import asyncio
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from tests.servers.answers import Answer, Request, State, answer_to, faulty, range_of
from tests.servers.faults import Close, Fault, Hang, Held, Reset, Short
from tests.servers.processes import input_ended, listening

__all__ = ["Serving"]

_AT_ONCE = 1 << 18
"""Bodies up to this size, in bytes, leave together with their header."""


class Serving:
    """A folder behind a listening socket, until the task that runs it is cancelled.

    Parameters
    ----------
    folder
        What is served; names that lead out of it are not found.
    answer
        Called with each request before it is answered, in the thread of the server; returns what
        is to go wrong, or None.
    record
        Called with each request when it has come.
    """

    def __init__(
        self,
        folder: Path,
        answer: Callable[[Request], Fault | None] | None = None,
        record: Callable[[Request], None] | None = None,
    ) -> None:
        self._folder = folder.resolve()
        self._answer = answer
        self._record = record
        self._asked: Counter[tuple[object, ...]] = Counter()

    async def run(self, listener: socket.socket) -> None:
        """Serve every connection; closes all of them, and the listener, at the end."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)

        def accept() -> None:
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):  # who asked has left
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = connections.create_task(self._serve(connection))
            # Called also for one that is cancelled before it begins.
            task.add_done_callback(partial(_closed, connection))

        try:
            async with asyncio.TaskGroup() as connections:
                # Not awaited: who is cancelled then would lose a connection.
                loop.add_reader(listener, accept)
                try:
                    await _forever()
                finally:
                    loop.remove_reader(listener)
        finally:
            listener.close()

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        buffer = b""
        try:
            keep = True
            while keep:
                while b"\r\n\r\n" not in buffer:
                    came = await loop.sock_recv(connection, 1 << 16)
                    if not came:
                        return
                    buffer += came
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                first, headers = _parsed(head)
                skipped = int(headers.get("content-length", 0))
                while len(buffer) < skipped:
                    buffer += await loop.sock_recv(connection, 1 << 16)
                buffer = buffer[skipped:]
                keep = await self._reply(connection, first, headers)
        except ConnectionError:
            return

    async def _reply(self, connection: socket.socket, first: str, headers: dict[str, str]) -> bool:
        """Answer a request; return whether the connection stays."""
        method, target, _ = first.split(" ", 2)
        parts = urlsplit(target)
        path = unquote(parts.path).lstrip("/")
        file = self._open(path)
        try:
            state = None if file is None else _state(file)
            request = self._request(method, path, parts.query, headers, state)
            fault = None if self._answer is None else self._answer(request)
            if isinstance(fault, Held):
                while not fault.released.is_set():
                    await asyncio.sleep(0.01)
                fault = None
            if isinstance(fault, Close):
                return False
            if fault == Hang():
                await _forever()
            answer = faulty(answer_to(method, headers, state), fault, state)
            return await self._send(connection, request, answer, file, fault)
        finally:
            if file is not None:
                file.close()

    def _open(self, path: str) -> BinaryIO | None:
        whole = os.path.normpath(self._folder / path)
        if not whole.startswith(f"{self._folder}{os.sep}"):
            return None
        try:
            return Path(whole).open("rb", buffering=0)
        except (OSError, ValueError):
            return None

    def _request(
        self, method: str, path: str, query: str, headers: dict[str, str], state: State | None
    ) -> Request:
        asked = None if state is None else range_of(headers.get("range"), state.size)
        if asked is not None and asked[0] >= asked[1]:
            asked = None
        self._asked[method, path, asked] += 1
        request = Request(method, path, query, asked, headers, self._asked[method, path, asked])
        if self._record is not None:
            self._record(request)
        return request

    async def _send(
        self,
        connection: socket.socket,
        request: Request,
        answer: Answer,
        file: BinaryIO | None,
        fault: Fault | None,
    ) -> bool:
        loop = asyncio.get_running_loop()
        request.status = answer.status
        keep = request.headers.get("connection", "").lower() != "close"
        head = answer.head(keep=keep)
        stop = 0 if request.method == "HEAD" else answer.stop
        cut = _cut(fault)
        if cut is not None:
            stop = min(stop, answer.start + cut)
        nbytes = max(0, stop - answer.start)
        body = answer.body if request.method != "HEAD" else b""
        request.sent = nbytes or len(body)
        if file is None or nbytes <= _AT_ONCE:
            if file is not None and nbytes:
                body = os.pread(file.fileno(), nbytes, answer.start)
            await loop.sock_sendall(connection, head + body)
        else:
            await loop.sock_sendall(connection, head)
            try:
                await loop.sock_sendfile(connection, file, answer.start, nbytes)
            except BaseException:
                request.sent = file.tell() - answer.start
                raise
        if isinstance(fault, Hang):
            await _forever()
        if isinstance(fault, Reset):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return keep and cut is None


def _cut(fault: Fault | None) -> int | None:
    """Return after how many bytes of the body a fault cuts it."""
    match fault:
        case Reset(after) | Hang(after):
            return after
        case Short(nbytes, announced=False):
            return nbytes
        case _:
            return None


def _closed(connection: socket.socket, _: "asyncio.Task[None]") -> None:
    connection.close()


async def _forever() -> None:
    await asyncio.Event().wait()


def _parsed(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


def _state(file: BinaryIO) -> State:
    found = os.fstat(file.fileno())
    return State(found.st_size, found.st_mtime_ns, found.st_ino)


async def _main(folder: Path) -> None:
    listener, port = listening()
    print(port, flush=True)  # noqa: T201
    serving = asyncio.ensure_future(Serving(folder).run(listener))
    await input_ended()
    serving.cancel()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
