"""One search for several ranks, whose result all of them have.

The first rank measures for all. They meet in a store of torch.distributed: that of the process
group, of torchrun, or one at MASTER_PORT, as `torch.distributed.init_process_group` makes. The
first rank calls the others twice, before it measures and after, and then leaves a message for all.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from cellfeed import CellfeedError, ParameterError
from cellfeed_tuner._measuring._process import MeasuringError
from cellfeed_tuner._ranks import World
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult, from_plain, to_plain
from cellfeed_tuner._time_budget import TimeBudget

if TYPE_CHECKING:
    from torch.distributed import Store

JOIN_SECONDS = 300.0
"""How long ranks wait for each other to begin."""
# How long the first rank waits for answers of ranks that wait for it. Chosen: they look every
# `POLL_SECONDS`, on a machine that may be busy.
ANSWER_SECONDS, POLL_SECONDS = 20.0, 0.05
# How long a rank tries at a time to reach the store of the first; meanwhile it cannot be
# interrupted.
CONNECT_SECONDS = 5.0
# How long other ranks wait at most, beyond the budget and its overtime; and if it is refused.
OTHER_SECONDS, LONGEST_SECONDS = 2 * JOIN_SECONDS, 1e6

_numbers = count()  # of meetings, whose keys stay

Message = Mapping[str, Any]
P = ParamSpec("P")


def on_rank_zero(tune: Callable[P, AutotuneResult]) -> Callable[P, AutotuneResult]:
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
        options = cast("dict[str, Any]", settings)
        world = World.here() if options.get("ranks") is None else None
        if world is None:
            return tune(*arguments, **settings)
        digest = _digest(arguments, options)
        if world.rank:
            limit = _limit_seconds(options["budget"])
            return _result_in(message_from_first(world, digest=digest, limit_seconds=limit))

        def result() -> Message:
            try:
                return {"result": to_plain(tune(*arguments, **settings))}
            except AutotuneInterrupted as interruption:
                return {"result": to_plain(interruption.result)}

        return _result_in(message_to_all(world, result, digest=digest))

    return tuned


def message_to_all(
    world: World,
    message: Callable[[], Message],
    *,
    digest: str = "",
    join_seconds: float = JOIN_SECONDS,
) -> Message:
    """Call a function when all ranks have come, leave its message for them, and return it.

    ``digest`` must be the same on all ranks. If this raises, the others get the error.

    Raises
    ------
    MeasuringError
        A rank does not come, or has ended.
    ParameterError
        Ranks contradict each other.
    """
    with _met(world, join_seconds) as store:
        if store.add("first", 1) > 1:
            raise ParameterError(_twice(0))
        try:
            _call(store, world, "begun", join_seconds)
            for rank in range(1, world.world_size):
                _require_alike(world, rank, digest, json.loads(store.get(f"rank {rank}")))
            found = message()
            _call(store, world, "ended", ANSWER_SECONDS)
        except BaseException as error:
            # Those that are there: once called, those that have answered.
            has_called = store.check(["ended"])
            _leave(store, world, _failure(error), "ended" if has_called else "begun")
            raise
        _leave(store, world, found, "ended")
    return found


def message_from_first(
    world: World, *, digest: str = "", join_seconds: float = JOIN_SECONDS, limit_seconds: float
) -> Message:
    """Return the message that the first rank leaves for all others.

    Raises
    ------
    MeasuringError
        The first rank does not come, ends, or leaves nothing in time.
    ParameterError
        Another process has the same rank.
    """
    hello = json.dumps({"world_size": world.world_size, "digest": digest})
    with _met(world, join_seconds) as store:
        if _missing(store, ["begun"], join_seconds):
            raise MeasuringError(_no_first(world, join_seconds))
        store.set(f"rank {world.rank}", hello)
        if store.add(f"begun {world.rank}", 1) > 1:
            raise ParameterError(_twice(world.rank))
        if not _missing(store, ["ended"], limit_seconds):
            store.add(f"ended {world.rank}", 1)
            if not _missing(store, ["message"], 2 * ANSWER_SECONDS):
                message: Message = json.loads(store.get("message"))
                store.add(f"heard {world.rank}", 1)
                return message
        msg = (
            f"rank 0, which measures for all, sent nothing for {limit_seconds:,.0f} s; see its "
            "last output, and restart all ranks"
        )
        raise MeasuringError(msg)


@contextmanager
def _met(world: World, seconds: float) -> "Iterator[Store]":
    """Give the place where ranks meet; what it raises says that a rank does not come or ended."""
    from torch.distributed import DistError, PrefixStore  # noqa: PLC0415 - for several ranks

    deadline = time.monotonic() + seconds
    while True:
        try:
            store = _store(world)
            break
        except RuntimeError as error:
            if world.rank == 0:
                msg = (
                    f"ranks cannot meet at {world.host}:{world.port} "
                    f"({str(error).splitlines()[0]}); give one process alone RANK=0, and all of "
                    "them a free MASTER_PORT"
                )
                raise ParameterError(msg) from error
            if time.monotonic() > deadline:
                raise MeasuringError(_no_first(world, seconds)) from error
    try:
        yield PrefixStore(f"cellfeed/autotune/{next(_numbers)}", store)
    except DistError as error:
        msg = "rank 0 ended while it measured for all; see its last output, and restart all ranks"
        raise MeasuringError(msg) from error


def _store(world: World) -> "Store":
    from torch import distributed  # noqa: PLC0415 - for several ranks

    if distributed.is_initialized():
        # There is no public way to it.
        found: Store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        return found
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _store_at(world.host, world.port, is_master=world.rank == 0 and not has_agent)


@cache  # it stays, since a process group that is made later has its store at the same port
def _store_at(host: str, port: int, *, is_master: bool) -> "Store":
    from torch.distributed import TCPStore  # noqa: PLC0415 - for several ranks

    limit = timedelta(seconds=CONNECT_SECONDS)
    return TCPStore(host, port, None, is_master, limit, wait_for_workers=False, multi_tenant=True)


def _call(store: "Store", world: World, key: str, seconds: float) -> None:
    """Call all other ranks, or raise `MeasuringError` if one does not answer in time."""
    store.set(key, "")
    missing = _missing(store, [f"{key} {rank}" for rank in range(1, world.world_size)], seconds)
    ranks = ", ".join(each.removeprefix(f"{key} ") for each in missing)
    if missing and key == "begun":
        msg = (
            f"rank{'s' * (len(missing) > 1)} {ranks} of {world.world_size} did not call `autotune` "
            f"within {seconds:g} s; call it on all ranks alike, or on one alone with `ranks`"
        )
        raise MeasuringError(msg)
    if missing:
        msg = (
            f"rank {ranks} ended while rank 0 measured for all; see its last output, and restart "
            "all ranks"
        )
        raise MeasuringError(msg)


def _leave(store: "Store", world: World, message: Message, answered: str) -> None:
    """Leave a message, and wait until the ranks that have answered a call have it.

    The store may end with this process.
    """
    store.set("message", json.dumps(message))
    store.set("ended", "")
    ranks = [k for k in range(1, world.world_size) if store.check([f"{answered} {k}"])]
    _missing(store, [f"heard {rank}" for rank in ranks], ANSWER_SECONDS)


def _missing(store: "Store", keys: Sequence[str], seconds: float) -> Sequence[str]:
    """Wait for keys, and return those that are not there in time.

    They are looked for, since a wait of the store cannot be interrupted.
    """
    deadline = time.monotonic() + seconds
    while (missing := [e for e in keys if not store.check([e])]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return missing


def _require_alike(world: World, rank: int, digest: str, hello: Mapping[str, Any]) -> None:
    if hello["world_size"] != world.world_size:
        msg = (
            f"rank {rank} has WORLD_SIZE={hello['world_size']}, but rank 0 has "
            f"{world.world_size}; set it to the same on all ranks, as torchrun does"
        )
        raise ParameterError(msg)
    if hello["digest"] != digest:
        msg = (
            f"rank {rank} called `autotune` with another collection or other arguments than rank "
            "0; call it alike on all ranks"
        )
        raise ParameterError(msg)


def _twice(rank: int) -> str:
    return f"two processes have RANK={rank}; set a different one for each, as torchrun does"


def _no_first(world: World, seconds: float) -> str:
    return (
        f"rank 0 did not call `autotune` within {seconds:g} s of rank {world.rank}; call it on all "
        "ranks alike, or on one alone with `ranks`"
    )


def _limit_seconds(budget: TimeBudget) -> float:
    """Return how long to wait; rank 0 refuses a wrong budget immediately."""
    seconds = LONGEST_SECONDS
    if isinstance(budget.seconds, int | float):
        seconds = budget.seconds + budget.overtime + OTHER_SECONDS
    return seconds if 0 < seconds < LONGEST_SECONDS else LONGEST_SECONDS


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
