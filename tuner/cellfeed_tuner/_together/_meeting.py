"""How ranks meet: each has a connection to the first, which tells them all the same.

A connection ends with its process, so that nobody waits for one that is gone. On one machine they
meet at a Unix socket in a folder of the user's own. Ranks of several machines are told a port by
the store of torch.distributed, or of torchrun. Nothing is received but JSON.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cellfeed import CellfeedError, ParameterError
from cellfeed_tuner._measuring._measuring_process import MeasuringError
from cellfeed_tuner._ranks import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["JOIN_SECONDS", "Meeting", "told_by_first"]

JOIN_SECONDS = 300.0
"""How long ranks wait for each other to begin."""

_AGAIN_SECONDS = 0.05
_HELLO_SECONDS = 10.0
_LONGEST_SOCKET_PATH = 100  # bytes; the least that systems allow is 104
_numbers = count()  # of meetings through a store, whose keys stay

Message = Mapping[str, Any]


class Meeting:
    """What the first rank holds while it works for all; a context manager.

    What is asked of it must be the same on all ranks.

    Raises
    ------
    MeasuringError
        On entry: a rank does not come, or is gone again.
    ParameterError
        On entry: ranks do not agree on who they are, or have no place to meet.
    """

    def __init__(
        self, world: World, *, asked: str = "", join_seconds: float = JOIN_SECONDS
    ) -> None:
        self._world, self._asked, self._join_seconds = world, asked, join_seconds
        self._others: list[tuple[int, Connection[bytes, bytes]]] = []

    def __enter__(self) -> Self:
        try:
            with _listening(self._world) as listener:
                self._take_in(listener, time.monotonic() + self._join_seconds)
        except BaseException as error:
            if isinstance(error, CellfeedError):
                self.tell({"error": type(error).__name__, "message": str(error)})
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def check(self) -> None:
        """Raise `MeasuringError` if a rank has ended; it says which."""
        gone = sorted(rank for rank, each in self._others if each.poll())
        if gone:
            msg = (
                f"rank {gone[0]} ended while rank 0 measured for all; see what it said last, and "
                "start all ranks again"
            )
            raise MeasuringError(msg)

    def tell(self, message: Message) -> None:
        """Send a message to all ranks that are still there."""
        data = json.dumps(message).encode()
        for _, each in self._others:
            try:
                each.send_bytes(data)
            except OSError:
                continue

    def _take_in(self, listener: "_Listener", deadline: float) -> None:
        world_size = self._world.world_size
        missing = set(range(1, world_size))
        while missing:
            self.check()
            if time.monotonic() > deadline:
                names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))}"
                msg = (
                    f"{names} of {world_size} did not call `autotune` within "
                    f"{self._join_seconds:g} s; call it on all ranks alike, or on one alone with "
                    "`ranks`"
                )
                raise MeasuringError(msg)
            found = listener.accepted()
            if found is None:
                continue
            connection, rank, theirs, asked = found
            self._others.append((rank, connection))
            if theirs != world_size:
                msg = (
                    f"rank {rank} has WORLD_SIZE={theirs}, but rank 0 has {world_size}; set it as "
                    "torchrun does, alike for all"
                )
                raise ParameterError(msg)
            if rank not in missing:
                msg = (
                    f"two processes have RANK={rank}; set it as torchrun does, a different one "
                    "for each"
                )
                raise ParameterError(msg)
            if asked != self._asked:
                msg = (
                    f"rank {rank} called `autotune` with another collection or other arguments "
                    "than rank 0; call it alike on all ranks"
                )
                raise ParameterError(msg)
            missing.remove(rank)

    def _close(self) -> None:
        for _, each in self._others:
            each.close()


def told_by_first(
    world: World, *, asked: str = "", join_seconds: float = JOIN_SECONDS, limit_seconds: float
) -> Message:
    """Return what the first rank tells all others, once it is there and asked the same.

    Raises
    ------
    MeasuringError
        It does not come, ends, or says nothing in time.
    """
    connection, hello = _joined(world, join_seconds)
    try:
        connection.send_bytes(json.dumps({**hello, "asked": asked}).encode())
        if not connection.poll(limit_seconds):
            msg = (
                f"rank 0, which measures for all, said nothing for {limit_seconds:,.0f} s; see "
                "what it waits for, and start all ranks again"
            )
            raise MeasuringError(msg)
        told: Message = json.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        msg = "rank 0 ended while it measured for all; see what it said last, and start all again"
        raise MeasuringError(msg) from error
    finally:
        connection.close()
    return told


class _Listener:
    """Where other ranks come to; a context manager."""

    def __init__(self, listener: socket.socket, token: str, path: Path | None = None) -> None:
        self._socket, self._token, self._path = listener, token, path
        listener.settimeout(_AGAIN_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def accepted(self) -> "tuple[Connection[bytes, bytes], int, int, str] | None":
        """Return a connection, its rank, number of ranks and what it asks; None if nobody comes."""
        try:
            accepted, _ = self._socket.accept()
        except TimeoutError:
            return None
        accepted.settimeout(None)
        # Whoever says no more than a part of it is not waited for.
        accepted.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_HELLO_SECONDS), 0)
        )
        connection: Connection[bytes, bytes] = Connection(accepted.detach())
        try:
            if connection.poll(_HELLO_SECONDS):
                hello = json.loads(connection.recv_bytes(maxlength=1000))
                if hmac.compare_digest(hello["token"], self._token):
                    rank, world_size = int(hello["rank"]), int(hello["world_size"])
                    return connection, rank, world_size, str(hello["asked"])
        except (EOFError, OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # whoever that was, it is no rank
        connection.close()
        return None


def _listening(world: World) -> _Listener:
    if not world.is_on_one_machine:
        store, token = _store(world), secrets.token_hex()
        listener = _open_port()
        store.set("first", json.dumps([listener.getsockname()[1], token]))
        return _Listener(listener, token)
    path = _socket_path(world)
    for left in path.parent.glob(f"*{path.suffix}"):
        if _has_ended(left):
            left.unlink(missing_ok=True)
        elif left == path:
            msg = "two processes have RANK=0; set it as torchrun does, a different one for each"
            raise ParameterError(msg)
    listener = socket.socket(socket.AF_UNIX)
    # Nobody sees it before it listens: it would look like one whose process was killed.
    new = path.with_suffix(f".{os.getpid()}")
    new.unlink(missing_ok=True)
    listener.bind(str(new))
    listener.listen(world.world_size)
    new.rename(path)
    return _Listener(listener, "", path)


def _open_port() -> socket.socket:
    """Listen where ``MASTER_ADDR`` leads: by IPv6 and by IPv4, if the machine has both."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # it is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _has_ended(path: Path) -> bool:
    """Return whether the process is gone that listened there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except BlockingIOError:  # as many others wait there as may
            return False
    return False


def _joined(world: World, seconds: float) -> "tuple[Connection[bytes, bytes], Message]":
    """Return a connection to the first rank, and who this one is."""
    deadline = time.monotonic() + seconds
    store = None if world.is_on_one_machine else _store(world)
    token, found = "", None
    while found is None:
        if time.monotonic() > deadline:
            msg = (
                f"rank 0 did not call `autotune` within {seconds:g} s of rank {world.rank}; call "
                "it on all ranks alike, or on one alone with `ranks`"
            )
            raise MeasuringError(msg)
        if store is None:
            found = _connected(_socket_path(world))
        elif store.check(["first"]):
            port, token = json.loads(store.get("first"))
            found = _connected((world.host, port))
        if found is None:
            time.sleep(_AGAIN_SECONDS)
    hello = {"rank": world.rank, "world_size": world.world_size, "token": token}
    return Connection(found.detach()), hello


def _connected(address: Path | tuple[str, int]) -> socket.socket | None:
    """Return a connection; None if nobody listens there."""
    try:
        if isinstance(address, tuple):
            found = socket.create_connection(address, timeout=_HELLO_SECONDS)
            found.settimeout(None)
            return found
        found = socket.socket(socket.AF_UNIX)
        try:
            found.connect(str(address))
        except OSError:
            found.close()
            raise
    except OSError:
        return None
    return found


def _socket_path(world: World) -> Path:
    """Return where ranks of this machine meet: one place for each training.

    Raises
    ------
    ParameterError
        Others may write to the folder that would hold it.
    """
    run = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    words = json.dumps([world.host, world.port, *run])
    name = f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.socket"
    folder = Path(tempfile.gettempdir(), f"cellfeed-{os.getuid()}")
    if len(os.fsencode(folder / name)) > _LONGEST_SOCKET_PATH:
        folder = Path("/tmp", folder.name)  # noqa: S108 - nobody else can write to it
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o77:
        msg = f"{folder}: ranks would meet there, but others may write to it; remove it"
        raise ParameterError(msg)
    return folder / name


def _store(world: World) -> "Store":
    """Return what ranks of several machines share already.

    Raises
    ------
    ParameterError
        They share nothing.
    """
    from torch import distributed  # noqa: PLC0415 - only where there are several machines
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415

    if distributed.is_initialized():
        # There is no other way to it.
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(rendezvous("env://"))
    else:
        msg = (
            f"{world.local_world_size} of {world.world_size} ranks are on this machine, and "
            "torch.distributed is not initialised, so that they cannot meet; initialise it before "
            "`autotune`, or start with torchrun"
        )
        raise ParameterError(msg)
    return PrefixStore(f"cellfeed/autotune/{next(_numbers)}", store)
