"""The whole grid in interleaved rounds, continued where it was interrupted."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from cellfeed import CellDataset, Collection, FormatError, ParameterError, SamplingStrategy
from cellfeed_tuner._autotune import request_of
from cellfeed_tuner._constants import UNLIMITED_SECONDS
from cellfeed_tuner._measuring._measurement import Measurement
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import MakeDataset
from cellfeed_tuner._request import Request
from cellfeed_tuner._result import AutotuneResult, from_plain, to_plain
from cellfeed_tuner._run import Run
from cellfeed_tuner._time_budget import Progress, TimeBudget, silent

SCHEMA = "cellfeed.profile/1"
# Arguments of `autotune` that a profile has no use for.
_OF_SEARCHES = ("budget", "need", "step_seconds", "step", "study", "ranks")


def profile(
    collection: Collection,
    *,
    rounds: int = 3,
    journal: Path | str | None = None,
    on_progress: Progress = silent,
    **settings: Any,
) -> AutotuneResult:
    """Time every configuration of a grid, also those that mix too little, in rounds.

    Each round times all configurations once, in random order, so that other load on the machine
    affects all alike. This takes as long as it takes: with the default grid, two seconds a
    configuration and round. `AutotuneResult.table` has the figures, and the recommendation is the
    one of `autotune` with all configurations timed.

    Parameters
    ----------
    collection
        As for `autotune`.
    rounds
        How often to time each configuration, at least 2.
    journal
        A file to which each timing is appended. If it exists, the timings in it count: an
        interrupted profile goes on from there, and more ``rounds`` add to it.
    on_progress
        Called with the stage "profile", the seconds spent, the seconds spent and to be expected,
        and what is being timed; and with other stages, as by `autotune`.
    settings
        Other arguments of `autotune`, but for those of its search: ``label``,
        ``batch_size``, ``block_sizes``, ``fetch_factors``, ``workers``, ``num_threads``,
        ``align``, ``dense``, ``entropy_floor``, ``memory``, ``cache``, ``seed``, ``indices``,
        ``strategy``, ``make_dataset``.

    Raises
    ------
    ParameterError
        As `autotune`; or ``rounds`` is below 2, the grid is too large to be timed as a whole, or
        the journal is of another profile.
    FormatError
        The journal is damaged.
    """
    for name in _OF_SEARCHES:
        if name in settings:
            msg = f"`{name}` is of `autotune`; a profile times the whole grid"
            raise ParameterError(msg)
    if rounds < 2:  # noqa: PLR2004 - an interval needs two
        msg = f"`rounds >= 2` must hold, but got rounds={rounds}"
        raise ParameterError(msg)
    request = request_of(collection, settings | {"budget": UNLIMITED_SECONDS, "ranks": 1})
    return profiled(
        request,
        rounds=rounds,
        journal=None if journal is None else Path(journal),
        strategy=settings.get("strategy"),
        on_progress=on_progress,
        make_dataset=settings.get("make_dataset", CellDataset),
    )


def profiled(
    request: Request,
    *,
    rounds: int,
    journal: Path | None,
    strategy: SamplingStrategy | None,
    on_progress: Progress,
    make_dataset: MakeDataset = CellDataset,
) -> AutotuneResult:
    """Do what `profile` does for a request."""
    if request.space.is_large:
        msg = (
            f"the grid has {request.space.size:,} configurations, too many to time each; give "
            "lists of sizes instead of ranges"
        )
        raise ParameterError(msg)
    with MeasuringProcess() as process:
        process.subject = request.subject
        run = Run(
            request=request,
            process=process,
            budget=TimeBudget(request.budget),
            on_progress=on_progress,
            make_dataset=make_dataset,
        )
        run.prepare()
        kept = None if journal is None else Journal(journal, run.fingerprint())
        run.start()
        run.profile(rounds, kept or (), kept.append if kept else lambda *_: None)
    return run.result(strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """A line of a journal: a timing in a round."""

    round: int
    found: Measurement


class Journal:
    """Timings of a profile as JSON lines, each written as soon as it is known.

    Parameters
    ----------
    path
        The file, which need not exist.
    belongs_to
        What was profiled. The first line of the file must say the same.

    Raises
    ------
    ParameterError
        The file is of another profile.
    FormatError
        It is no journal.
    """

    def __init__(self, path: Path, belongs_to: Mapping[str, Any]) -> None:
        self._path, head = path, _line({"schema": SCHEMA, **belongs_to})
        content = path.read_bytes() if path.exists() else b""
        if head.startswith(content):
            path.write_bytes(head)
            content = head
        # A line that was being written when the process was killed is written again.
        n_whole = content.rfind(b"\n") + 1
        first, *self._lines = content[:n_whole].splitlines() or [b""]
        wanted, found = json.loads(head), _parsed(first)
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            msg = f"{path}: no journal of a profile; choose another file or folder"
            raise FormatError(msg)
        differing = [name for name, value in wanted.items() if found.get(name) != value]
        if differing:
            msg = (
                f"{path}: the profile in it has another {', '.join(differing)}; delete it, or "
                "choose another file or folder"
            )
            raise ParameterError(msg)
        os.truncate(path, n_whole)

    def __iter__(self) -> Iterator[tuple[int, Measurement]]:
        """Iterate over the timings, each with the number of its round."""
        for number, line in enumerate(self._lines, start=2):
            try:
                each = from_plain(_Timing, _parsed(line))
            except msgspec.ValidationError as error:
                msg = f"{self._path}: line {number} is damaged ({error}); delete the file"
                raise FormatError(msg) from error
            yield each.round, each.found

    def append(self, turn: int, found: Measurement) -> None:
        """Write one timing."""
        timed = replace(found, sampled=())
        with self._path.open("ab") as file:
            file.write(_line(to_plain(_Timing(round=turn, found=timed))))
            file.flush()
            os.fsync(file.fileno())


def _line(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
