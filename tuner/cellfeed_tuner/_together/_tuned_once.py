"""``autotune`` on several ranks: the first measures for all, and all get the same result."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, cast

from cellfeed import CellfeedError
from cellfeed_tuner._defaults import DEFAULT_BUDGET_SECONDS
from cellfeed_tuner._interruption import AutotuneInterrupted
from cellfeed_tuner._measuring._measuring_process import MeasuringError
from cellfeed_tuner._plain import from_plain, to_plain
from cellfeed_tuner._progress import Progress, silent
from cellfeed_tuner._ranks._world import World
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._together._meeting import Meeting, Message, told_by_first

__all__ = ["tuned_once"]

# How long other ranks wait: for so many budgets, and for what comes before and after these.
_BUDGETS, _BESIDE_SECONDS = 5, 600.0

P = ParamSpec("P")


def tuned_once(tune: Callable[P, AutotuneResult]) -> Callable[P, AutotuneResult]:
    """Have only the first of several ranks call a function, whose result all of them return.

    Where ``ranks`` is given, this process is by itself.

    Raises
    ------
    CellfeedError
        On all ranks, what the first raised.
    MeasuringError
        A rank did not come, or has ended.
    """

    @wraps(tune)
    def tuned(*arguments: P.args, **settings: P.kwargs) -> AutotuneResult:
        given = cast("dict[str, Any]", settings)
        world = World.here() if given.get("ranks") is None else None
        if world is None:
            return tune(*arguments, **settings)
        if world.rank:
            budget = given.get("budget", DEFAULT_BUDGET_SECONDS)
            told = told_by_first(world, limit_seconds=_BUDGETS * budget + _BESIDE_SECONDS)
            return _as_told(told)
        with Meeting(world) as meeting:
            on_progress: Progress = given.get("on_progress", silent)

            def progress(stage: str, done: float, total: float) -> None:
                meeting.check()
                on_progress(stage, done, total)

            given["on_progress"] = progress
            try:
                told = {"result": to_plain(tune(*arguments, **settings))}
                meeting.check()
            except AutotuneInterrupted as interruption:
                told = {"result": to_plain(interruption.result)}
            except BaseException as error:
                meeting.tell(_failure(error))
                raise
            meeting.tell(told)
        return _as_told(told)

    return tuned


def _failure(error: BaseException) -> Message:
    if isinstance(error, CellfeedError):
        return {"error": type(error).__name__, "message": str(error)}
    said = " ".join(f"{type(error).__name__} {error}".split())
    return {"error": "MeasuringError", "message": f"autotune ended on rank 0: {said}"}


def _as_told(told: Message) -> AutotuneResult:
    if "error" in told:
        kinds = {each.__name__: each for each in CellfeedError.__subclasses__()}
        raise kinds.get(told["error"], MeasuringError)(told["message"])
    result = from_plain(AutotuneResult, told["result"])
    if result.interrupted:
        raise AutotuneInterrupted(result)
    return result
