"""``autotune`` on several ranks: the first measures for all, and all return the same result."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import wraps
from typing import Any, ParamSpec, cast

from cellfeed import CellfeedError
from cellfeed_tuner._measuring._measuring_process import MeasuringError
from cellfeed_tuner._plain import from_plain, to_plain
from cellfeed_tuner._progress import Progress, silent
from cellfeed_tuner._ranks import World
from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult
from cellfeed_tuner._searching._time_budget import TimeBudget
from cellfeed_tuner._together._meeting import (
    JOIN_SECONDS,
    Meeting,
    Message,
    message_from_first,
)

__all__ = ["tuned_once"]

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

            def progress(stage: str, done: float, total: float) -> None:
                meeting.check()
                on_progress(stage, done, total)

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
