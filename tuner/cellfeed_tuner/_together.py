"""One search for several ranks, whose result all of them have."""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, cast

from cellfeed import CellfeedError, ParameterError
from cellfeed_tuner._measuring._process import MeasuringError
from cellfeed_tuner._ranks import World
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult, from_plain, to_plain
from cellfeed_tuner._time_budget import Progress, TimeBudget, silent

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


# Connections between ranks: each is connected to the first, which sends the same to all.
#
# A connection ends with its process, so that nobody waits for a dead rank. Ranks of one machine
# meet at a Unix socket in a folder that only the user can write to. Ranks of several machines get
# a port and a token through the store of torch.distributed or torchrun. Only JSON is received.

JOIN_SECONDS = 300.0
"""How long ranks wait for each other to begin."""

_RETRY_SECONDS = 0.05
_HELLO_SECONDS = 10.0
_LONGEST_SOCKET_PATH = 100  # bytes; the lowest limit of any system is 104
_numbers = count()  # of meetings through a store, whose keys stay

Message = Mapping[str, Any]


class Meeting:
    """The first rank's connections to all others; a context manager.

    ``digest`` must be the same on all ranks.

    Raises
    ------
    MeasuringError
        On entry: a rank does not come, or has ended.
    ParameterError
        On entry: variables of ranks contradict each other, or ranks have no place to meet.
    """

    def __init__(
        self, world: World, *, digest: str = "", join_seconds: float = JOIN_SECONDS
    ) -> None:
        self._world, self._digest, self._join_seconds = world, digest, join_seconds
        self._others: list[tuple[int, Connection[bytes, bytes]]] = []

    def __enter__(self) -> Self:
        try:
            with _listening(self._world) as (listener, token):
                self._accept_all(listener, token, time.monotonic() + self._join_seconds)
        except BaseException as error:
            if isinstance(error, CellfeedError):
                self.send({"error": type(error).__name__, "message": str(error)})
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        for _, each in self._others:
            each.close()

    def check(self) -> None:
        """Raise `MeasuringError` if a rank has ended."""
        gone = sorted(rank for rank, each in self._others if each.poll())
        if gone:
            msg = (
                f"rank {gone[0]} ended while rank 0 measured for all; see its last output, and "
                "restart all ranks"
            )
            raise MeasuringError(msg)

    def send(self, message: Message) -> None:
        """Send a message to all ranks that are still there."""
        data = json.dumps(message).encode()
        for _, each in self._others:
            with suppress(OSError):
                each.send_bytes(data)

    def _accept_all(self, listener: socket.socket, token: str, deadline: float) -> None:
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
            found = _accepted(listener, token)
            if found is None:
                continue
            connection, rank, theirs, digest = found
            self._others.append((rank, connection))
            if theirs != world_size:
                msg = (
                    f"rank {rank} has WORLD_SIZE={theirs}, but rank 0 has {world_size}; set it to "
                    "the same on all ranks, as torchrun does"
                )
                raise ParameterError(msg)
            if rank not in missing:
                msg = (
                    f"two processes have RANK={rank}; set a different one for each, as torchrun "
                    "does"
                )
                raise ParameterError(msg)
            if digest != self._digest:
                msg = (
                    f"rank {rank} called `autotune` with another collection or other arguments "
                    "than rank 0; call it alike on all ranks"
                )
                raise ParameterError(msg)
            missing.remove(rank)


def message_from_first(
    world: World, *, digest: str = "", join_seconds: float = JOIN_SECONDS, limit_seconds: float
) -> Message:
    """Return the message that the first rank sends to all others.

    Raises
    ------
    MeasuringError
        The first rank does not come, ends, or sends nothing in time.
    """
    connection, token = _joined(world, join_seconds)
    hello = {
        "rank": world.rank, "world_size": world.world_size, "token": token, "digest": digest,
    }  # fmt: skip
    try:
        connection.send_bytes(json.dumps(hello).encode())
        if not connection.poll(limit_seconds):
            msg = (
                f"rank 0, which measures for all, sent nothing for {limit_seconds:,.0f} s; see "
                "its last output, and restart all ranks"
            )
            raise MeasuringError(msg)
        message: Message = json.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        msg = "rank 0 ended while it measured for all; see its last output, and restart all ranks"
        raise MeasuringError(msg) from error
    finally:
        connection.close()
    return message


def _accepted(
    listener: socket.socket, token: str
) -> "tuple[Connection[bytes, bytes], int, int, str] | None":
    """Return a connection, its rank, number of ranks and digest; None if no rank connects."""
    try:
        accepted, _ = listener.accept()
    except TimeoutError:
        return None
    accepted.settimeout(None)
    # Do not wait for the rest of a partial message.
    accepted.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_HELLO_SECONDS), 0)
    )
    connection: Connection[bytes, bytes] = Connection(accepted.detach())
    try:
        if connection.poll(_HELLO_SECONDS):
            hello = json.loads(connection.recv_bytes(maxlength=1000))
            if hmac.compare_digest(hello["token"], token):
                rank, world_size = int(hello["rank"]), int(hello["world_size"])
                return connection, rank, world_size, str(hello["digest"])
    except (EOFError, OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # it is no rank
    connection.close()
    return None


@contextmanager
def _listening(world: World) -> Iterator[tuple[socket.socket, str]]:
    """Listen for other ranks; gives a socket, and the token that they must send."""
    if world.is_on_one_machine:
        path, token = _free_socket_path(world), ""
        listener = socket.socket(socket.AF_UNIX)
        # Its name appears after it listens: before, it would look like that of a killed process.
        new = path.with_suffix(f".{os.getpid()}")
        new.unlink(missing_ok=True)
        listener.bind(str(new))
        listener.listen(world.world_size)
        new.rename(path)
    else:
        path, token = None, secrets.token_hex()
        store, listener = _store(world), _open_port()
        store.set("first", json.dumps([listener.getsockname()[1], token]))
    listener.settimeout(_RETRY_SECONDS)
    try:
        with listener:
            yield listener, token
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _open_port() -> socket.socket:
    """Listen on a free port, by IPv6 and IPv4 if the machine has both."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be disabled
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _joined(world: World, seconds: float) -> "tuple[Connection[bytes, bytes], str]":
    """Return a connection to the first rank, and the token to send."""
    deadline = time.monotonic() + seconds
    path = _socket_path(world) if world.is_on_one_machine else None
    store = None if world.is_on_one_machine else _store(world)
    token, found = "", None
    while found is None:
        if time.monotonic() > deadline:
            msg = (
                f"rank 0 did not call `autotune` within {seconds:g} s of rank {world.rank}; call "
                "it on all ranks alike, or on one alone with `ranks`"
            )
            raise MeasuringError(msg)
        with suppress(OSError):  # nobody listens there yet
            if path is not None:
                found = _connected(path)
            elif store is not None and store.check(["first"]):
                port, token = json.loads(store.get("first"))
                found = socket.create_connection((world.host, port), timeout=_HELLO_SECONDS)
                found.settimeout(None)
        if found is None:
            time.sleep(_RETRY_SECONDS)
    return Connection(found.detach()), token


def _connected(path: Path, timeout: float | None = None) -> socket.socket:
    """Return a Unix socket that is connected to a path; `OSError` if nobody listens there."""
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(timeout)
    try:
        found.connect(str(path))
    except OSError:
        found.close()
        raise
    return found


def _free_socket_path(world: World) -> Path:
    """Return the path to listen at, after removing sockets of processes that were killed."""
    path = _socket_path(world)
    for left in path.parent.glob(f"*{path.suffix}"):
        try:
            _connected(left, timeout=0.0).close()
        except (ConnectionRefusedError, FileNotFoundError):
            left.unlink(missing_ok=True)
            continue
        except BlockingIOError:
            pass  # its queue is full
        if left == path:
            msg = "two processes have RANK=0; set a different one for each, as torchrun does"
            raise ParameterError(msg)
    return path


def _socket_path(world: World) -> Path:
    """Return where ranks of this machine meet: one path for each training.

    Raises
    ------
    ParameterError
        Others may write to its folder.
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
    """Return the store that ranks of several machines share.

    Raises
    ------
    ParameterError
        They share none.
    """
    from torch import distributed  # noqa: PLC0415 - only for several machines
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415

    if distributed.is_initialized():
        # There is no public way to it.
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


# ``autotune`` on several ranks: the first measures for all, and all return the same result.

# How long other ranks wait at most, beyond the budget and its overtime; and if it is refused.
_OTHER_SECONDS, _LONGEST_SECONDS = 2 * JOIN_SECONDS, 1e6

P = ParamSpec("P")


def tuned_once(tune: Callable[P, AutotuneResult]) -> Callable[P, AutotuneResult]:
    """Have only the first of several ranks call a function, and all ranks return its result.

    If ``ranks`` is given, this process is the only one.

    Raises
    ------
    CellfeedError
        On all ranks, the error of the first.
    MeasuringError
        A rank did not come, or has ended.
    """

    @wraps(tune)
    def tuned(*arguments: P.args, **settings: P.kwargs) -> AutotuneResult:
        given = cast("dict[str, Any]", settings)
        world = World.here() if given.get("ranks") is None else None
        if world is None:
            return tune(*arguments, **settings)
        digest = _digest(arguments, given)
        if world.rank:
            limit = _limit_seconds(given["budget"])
            return _result_in(message_from_first(world, digest=digest, limit_seconds=limit))
        with Meeting(world, digest=digest) as meeting:
            on_progress: Progress = given.get("on_progress", silent)

            def progress(stage: str, done: float, total: float, doing: str = "") -> None:
                meeting.check()
                on_progress(stage, done, total, doing)

            given["on_progress"] = progress
            try:
                message = {"result": to_plain(tune(*arguments, **settings))}
                meeting.check()
            except AutotuneInterrupted as interruption:
                message = {"result": to_plain(interruption.result)}
            except BaseException as error:
                meeting.send(_failure(error))
                raise
            meeting.send(message)
        return _result_in(message)

    return tuned


def _limit_seconds(budget: TimeBudget) -> float:
    """Return how long to wait; rank 0 refuses a wrong budget immediately."""
    seconds = _LONGEST_SECONDS
    if isinstance(budget.seconds, int | float):
        seconds = budget.seconds + budget.overtime + _OTHER_SECONDS
    return seconds if 0 < seconds < _LONGEST_SECONDS else _LONGEST_SECONDS


def _digest(arguments: Iterable[object], settings: Mapping[str, Any]) -> str:
    """Return a text that is the same for the same sizes and plain settings."""
    words = [f"{len(each)}" for each in arguments if isinstance(each, Sized)]
    plain = {name: value for name, value in settings.items() if _is_plain(value)}
    words += [f"{name}={value!r}" for name, value in sorted(plain.items())]
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)


def _failure(error: BaseException) -> Message:
    if isinstance(error, CellfeedError):
        return {"error": type(error).__name__, "message": str(error)}
    words = " ".join(f"{type(error).__name__} {error}".split())
    return {"error": "MeasuringError", "message": f"autotune ended on rank 0: {words}"}


def _result_in(message: Message) -> AutotuneResult:
    if "error" in message:
        kinds = {each.__name__: each for each in CellfeedError.__subclasses__()}
        raise kinds.get(message["error"], MeasuringError)(message["message"])
    result = from_plain(AutotuneResult, message["result"])
    if result.interrupted:
        raise AutotuneInterrupted(result)
    return result
