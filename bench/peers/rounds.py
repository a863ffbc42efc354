"""Run every entry in a fresh process, in random order, round after round, from an empty cache."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import page_cache
import processes
from collection import Collection, what_is_wrong
from conversions import JOBS, Stores
from entries import Entry
from failures import FailedError
from interpreters import Interpreters

SHARE_OF_SECONDS_FOR_LIMITS = 0.3  # they have no start that would need time to wear off


@dataclass
class Result:
    """What came of an entry.

    Attributes
    ----------
    entry
        The entry.
    rounds
        Answers of its timed rounds by number, from 1.
    peak_bytes
        Most memory, in the round that is not timed.
    packages
        Versions.
    error
        Why it failed the last time that it did, None if it never did.
    is_sound
        Whether it passed the check; what did not is not timed.
    """

    entry: Entry
    rounds: dict[int, dict] = field(default_factory=dict)
    peak_bytes: int | None = None
    packages: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    is_sound: bool = False

    def speeds(self) -> dict[int, float]:
        """Return cells per second by round."""
        return {number: each["cells"] / each["seconds"] for number, each in self.rounds.items()}

    def to_json(self) -> dict:
        """Return everything that was measured."""
        return asdict(self)


class Runner:
    """Runs entries.

    Parameters
    ----------
    collection, stores, interpreters
        What is read, and by whom.
    seconds
        How long an epoch is followed.
    timeout
        Seconds until a process is ended.
    seed
        The order of entries and the seeds of loaders follow from it.
    output
        Folder for logs.
    say
        Called with the progress.
    """

    def __init__(
        self,
        *,
        collection: Collection,
        stores: Stores,
        interpreters: Interpreters,
        seconds: float,
        timeout: float,
        seed: int,
        output: Path,
        say: Callable[[str], None],
    ):
        self._collection, self._stores, self._interpreters = collection, stores, interpreters
        self._seconds, self._timeout, self._seed = seconds, timeout, seed
        self._output, self._say = output, say
        self.cache = "not dropped yet"

    def check(self, results: list[Result]) -> None:
        """Run each loader once untimed: is what it delivers right, and how much memory has it?"""
        for result in self._in_random_order([r for r in results if not r.entry.is_limit], 0):
            self._run(result, 0)

    def time(self, results: list[Result], number: int) -> None:
        """Run each limit, and each loader that passed the check, with the clock running."""
        sound = [result for result in results if result.is_sound or result.entry.is_limit]
        for result in self._in_random_order(sound, number):
            self._run(result, number)

    def _in_random_order(self, results: list[Result], number: int) -> list[Result]:
        order = np.random.default_rng([self._seed, number]).permutation(len(results))
        return [results[i] for i in order]

    def _run(self, result: Result, number: int) -> None:
        try:
            answer = self._answer(result, number)
        except FailedError as failure:
            result.error = str(failure)
            self._say(f"round {number}: {result.entry.name}: failed: {failure}")
            return
        result.packages = answer.pop("packages", {})
        if number == 0:
            result.is_sound = True
            self._say(f"round 0: {result.entry.name}: checked")
        else:
            result.rounds[number] = answer
            self._say(
                f"round {number}: {result.entry.name}: {result.speeds()[number]:,.0f} cells/s"
            )

    def _answer(self, result: Result, number: int) -> dict:
        """Run an entry in a fresh process and return what it measured."""
        entry = result.entry
        reason = self._stores.why_not(entry.storage)
        if reason is not None:
            raise FailedError(reason)
        interpreter = self._interpreters.of(entry.environment)
        log = self._output / "logs" / f"{_file_name(entry.name)}-{number}.err"
        fingerprints = log.with_suffix(".npy") if number == 0 else None
        self.cache = page_cache.drop([self._stores.path(entry.storage)])
        outcome = processes.run(
            [interpreter, JOBS / entry.job, json.dumps(self._job(entry, number, fingerprints))],
            timeout=self._timeout,
            log=log,
            watch_memory=number == 0,
        )
        if outcome.error is not None:
            raise FailedError(outcome.error)
        if number == 0:
            result.peak_bytes = outcome.peak_bytes
        answer = outcome.answer()
        if answer["cells"] == 0:
            raise FailedError("no cell was delivered")
        if fingerprints is not None:
            self._check(entry, fingerprints, answer["seen"])
        return answer

    def _check(self, entry: Entry, fingerprints: Path, seen: dict) -> None:
        wrong = what_is_wrong(
            self._collection,
            np.load(fingerprints),
            seen,
            batch_size=entry.batch_size,
            output=entry.output,
        )
        fingerprints.unlink()
        if wrong is not None:
            raise FailedError(wrong)

    def _job(self, entry: Entry, number: int, fingerprints: Path | None) -> dict:
        share = SHARE_OF_SECONDS_FOR_LIMITS if entry.is_limit else 1
        return {
            "plates": [str(plate) for plate in self._collection.plates],
            "store": str(self._stores.path(entry.storage)),
            "label": self._collection.label,
            "batch_size": entry.batch_size,
            "seconds": self._seconds * share,
            "seed": 1_000 * self._seed + number,
            "settings": entry.settings,
            "fingerprints": None if fingerprints is None else str(fingerprints),
        }


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)
