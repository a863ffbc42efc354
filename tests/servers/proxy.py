"""How does a server far away answer? A TCP proxy that adds round-trip time and limits bandwidth.

``python -m tests.servers.proxy HOST PORT ROUND_TRIP_S BYTES_PER_S`` writes its port, and passes
bytes on until its input ends. Each direction is delayed by half a round trip, whatever is under
way; a connection opens at the cost of a round trip too: what a client sends before is taken as
sent then. The bandwidth is shared by all connections, each direction for itself.
"""

import asyncio
import contextlib
import select
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import Self
from urllib.parse import urlsplit

from tests.servers.processes import ModuleProcess, input_ended, listening

__all__ = ["DelayingProxy"]


class DelayingProxy:
    """Put a distance between a client and a server; in a process of its own.

    Parameters
    ----------
    target
        URL of the server: its scheme, host and port count.
    round_trip_s
        Round-trip time, in seconds.
    bytes_per_s
        Bandwidth of each direction over all connections; None sets no limit.

    Attributes
    ----------
    url
        Of the proxy, without a slash at the end.
    """

    def __init__(self, target: str, round_trip_s: float, bytes_per_s: float | None = None) -> None:
        self._target = urlsplit(target)
        self._arguments = str(round_trip_s), str(bytes_per_s or float("inf"))

    def __enter__(self) -> Self:
        host, port = self._target.hostname, self._target.port
        self._process = ModuleProcess("tests.servers.proxy", str(host), str(port), *self._arguments)
        self.url = f"{self._target.scheme}://127.0.0.1:{int(self._process.line())}"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.close()


class _Line:
    """One direction of the way: when do bytes arrive that are sent now?"""

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay = delay_s
        self._rate = bytes_per_s
        self._free_at = 0.0

    def sent(self, now: float, nbytes: int, *, opened_at: float) -> tuple[float, float]:
        """Return when so many bytes have left the sender, and when they arrive."""
        self._free_at = max(self._free_at, now) + nbytes / self._rate
        left = self._free_at if nbytes else now
        return left, max(left, opened_at) + self._delay


class _End(asyncio.Protocol):
    """One end of a connection through the proxy; what comes here leaves at the `other` end."""

    def __init__(self, line: _Line, opened_at: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._line = line
        self._opened_at = opened_at
        self._arriving: deque[Callable[[], None]] = deque()
        self._arrives = 0.0
        self._pauses = 0
        self._came_to_an_end = False
        self._ended = False
        self.other: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pauses += 1
        # Python before 3.11.4 begins to read after this method, whether it is paused or not.
        self._loop.call_soon(transport.pause_reading)

    def join(self, other: "_End") -> None:
        """Begin to read, now that there is another end."""
        self.other = other
        self.resume()

    def data_received(self, data: bytes) -> None:
        left = self._later(lambda: self._far.write(data), len(data))
        if left > self._loop.time():
            self.pause()
            self._loop.call_at(left, self.resume)

    def eof_received(self) -> bool:
        self._came_to_an_end = True
        self._later(self._far.end)
        return not self._ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._pauses = -1
        if exc is not None and self.other is not None:
            self._later(self._far.abort)

    def pause_writing(self) -> None:
        self._far.pause()

    def resume_writing(self) -> None:
        self._far.resume()

    def pause(self) -> None:
        """Read nothing for now; each pause takes a `resume`."""
        if self._pauses >= 0:
            self._pauses += 1
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._pauses > 0:
            self._pauses -= 1
            if not self._pauses:
                self.transport.resume_reading()

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def end(self) -> None:
        """Send the end of the bytes; close once both directions have ended."""
        self._ended = True
        if self._came_to_an_end:
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.write_eof()

    def abort(self) -> None:
        connection = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    @property
    def _far(self) -> "_End":
        assert self.other is not None
        return self.other

    def _later(self, action: Callable[[], None], nbytes: int = 0) -> float:
        """Do something at the other end when it arrives there; return when it has left."""
        now = self._loop.time()
        left, arrives = self._line.sent(now, nbytes, opened_at=self._opened_at)
        self._arrives = max(self._arrives, arrives)
        self._arriving.append(action)
        if self._arrives <= now:
            self._arrive()
        else:
            self._loop.call_at(self._arrives, self._arrive)
        return left

    def _arrive(self) -> None:
        self._arriving.popleft()()


class _FineSelector(selectors.DefaultSelector):
    """Wait for less than a millisecond too, which epoll rounds up."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


async def _main(host: str, port: int, round_trip_s: float, bytes_per_s: float) -> None:
    loop = asyncio.get_running_loop()
    there, back = (_Line(round_trip_s / 2, bytes_per_s) for _ in range(2))
    opening: set[asyncio.Task[None]] = set()

    async def connect(client: _End) -> None:
        try:
            _, server = await loop.create_connection(lambda: _End(back, 0), host, port)
        except OSError:
            loop.call_later(round_trip_s, client.abort)
        else:
            client.join(server)
            server.join(client)

    class Client(_End):
        def __init__(self) -> None:
            super().__init__(there, loop.time() + round_trip_s)

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            task = asyncio.ensure_future(connect(self))
            opening.add(task)
            task.add_done_callback(opening.discard)

    listener, listened = listening()
    async with await loop.create_server(Client, sock=listener, backlog=1024):
        print(listened, flush=True)  # noqa: T201
        await input_ended()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_FineSelector())) as runner:
        runner.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
