"""What terminal and page say in the same words."""

from cellfeed.console import format_bytes
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._machine._storage import Storage
from cellfeed_tuner._measuring._bytes_read import BytesRead
from cellfeed_tuner._measuring._measure import LEAST_ROUNDS
from cellfeed_tuner._result import AutotuneResult, Recommended, Waiting

__all__ = [
    "cache_in_words",
    "how_measured",
    "interval",
    "loader_faults",
    "proof_of_choice",
    "storage_in_words",
    "untimed_in_words",
    "use_in_words",
    "why_nothing",
]

_MOST_FAULTS = 3
_MOST_REASONS = 3


def interval(speed: Estimate) -> str:
    """Return a throughput with its interval.

    Examples
    --------
    >>> interval(Estimate(43_932.4, 41_612.0, 46_525.0))
    '43,932 [41,612, 46,525]'
    """
    return f"{speed.value:,.0f} [{speed.low:,.0f}, {speed.high:,.0f}]"


def storage_in_words(storage: Storage) -> str:
    """Return what a file system is and how fast it reads."""
    speeds = ", ".join(
        f"{kind} reads {speed.bytes_per_second / 1e6:,.0f} MB/s"
        for kind, speed in (("sequential", storage.sequential), ("random", storage.random))
        if speed is not None
    )
    return (
        f"{storage.file_system or 'unknown file system'} on {storage.device or 'unknown'}: "
        f"{speeds or storage.note or 'read speed unknown'}"
    )


def cache_in_words(result: AutotuneResult) -> list[str]:
    """Return the state of the page cache, and what else to measure if files fit in memory."""
    said = {
        "cold": "cold, dropped before every round, as where files exceed memory",
        "warm": "warm, all files read beforehand",
        "unknown": "unknown, since the kernel kept pages that were to be dropped",
    }[result.cache]
    fits = result.dataset.bytes_on_disk < result.machine.memory.available_bytes / 2
    if result.cache == "cold" and fits:
        return [said, "(these files fit in memory: see --cache warm for epochs after the first)"]
    return [said]


def how_measured(recommended: Recommended) -> str:
    """Return what the figure of the choice rests on."""
    if recommended.measured_afresh:
        return "measured afresh"
    return "as searched, could not be measured afresh in time"


def loader_faults(result: AutotuneResult) -> list[str]:
    """Return a sentence for each loader that did not deliver what was planned, the first few."""
    return [
        f"{each.configuration}: {each.verdict.sentence}"
        for each in result.configurations
        if each.verdict is not None and each.verdict.kind == "loader"
    ][:_MOST_FAULTS]


def proof_of_choice(result: AutotuneResult) -> list[str]:
    """Return what the entropy of the choice proves, and whether files are shuffled already."""
    chosen = result.recommended and result.recommended.configuration
    lines = [
        each.verdict.sentence
        for each in result.configurations
        if each.configuration == chosen
        and each.verdict is not None
        and each.verdict.kind != "loader"
    ]
    if result.storage_order is not None and result.storage_order.already_shuffled:
        lines.append(result.storage_order.sentence)
    return lines


def use_in_words(result: AutotuneResult) -> list[str]:
    """Return how long training waits for the choice, and what that reads."""
    chosen = result.recommended
    if chosen is None:
        return []
    return [
        *([_waiting(chosen.waiting, result)] if chosen.waiting else []),
        *[
            _reading(each.bytes_read_per_cell, result)
            for each in result.configurations
            if each.configuration == chosen.configuration and each.bytes_read_per_cell
        ],
    ]


def _reading(read: BytesRead, result: AutotuneResult) -> str:
    stored = result.dataset.stored_bytes_per_cell
    said = f"For each cell, {format_bytes(round(stored))} in storage, it asks for "
    said += f"{read.asked / stored:.1f} times as much"
    if result.cache != "cold":
        return f"{said}."
    return f"{said}, and the system reads {read.from_storage / stored:.1f} times as much."


def _waiting(waiting: Waiting, result: AutotuneResult) -> str:
    step = f"{1000 * (result.constraints.step_seconds or 0):g} ms"
    if waiting.share is None:
        return (
            f"There was no time to measure it with a training step of {step}; by its throughput, "
            f"training would wait {waiting.expected_share:.1%} of the time."
        )
    share = waiting.share
    spread = f" [{share.low:.1%}, {share.high:.1%}]" if waiting.n_rounds > 1 else ""
    fetches = "1 whole fetch" if waiting.n_rounds == 1 else f"{waiting.n_rounds} whole fetches"
    few = "" if waiting.n_rounds >= LEAST_ROUNDS else ", which is not enough to rely on"
    return (
        f"With a training step of {step}, training waits {share.value:.1%}{spread} of the time, "
        f"measured over {fetches} per worker{few}."
    )


def untimed_in_words(result: AutotuneResult) -> list[str]:
    """Return how many configurations there was no time for, if there are any."""
    untimed = sum(each.status == "out of budget" for each in result.configurations)
    if not untimed:
        return []
    counted = "1 configuration was" if untimed == 1 else f"{untimed} configurations were"
    return [f"{counted} not timed for want of budget (see --budget)."]


def why_nothing(result: AutotuneResult) -> str:
    """Return what comes nearest where nothing is feasible, or why nothing could be timed."""
    if result.nearest is not None:
        return f"Nearest is {result.nearest.configuration}, but {result.nearest.problem}."
    reasons = {each.note or each.status for each in result.configurations}
    return f"None could be timed: {'; '.join(sorted(reasons)[:_MOST_REASONS])}."
