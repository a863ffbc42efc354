"""Rounds: every entry in a fresh process, in random order, from an empty cache; and their figures.

Figures are medians with their uncertainty; ratios are of the same rounds.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import processes
from collection import Collection, what_is_wrong
from conversions import JOBS, Stores
from entries import Entry
from processes import FailedError, Interpreters, say

MEASURING = ("processes.py", "rounds.py", "jobs/loaders.py", "jobs/protocol.py")
FEWEST_FOR_BOOTSTRAP = 5
N_RESAMPLES = 10_000
SHARE_OF_SECONDS_FOR_LIMITS = 0.3  # they have no start that would need time to wear off


@dataclass(frozen=True)
class Plan:
    """What is asked for on the command line.

    Attributes
    ----------
    output
        Folder for everything that is written.
    n_rounds, n_conversions
        How often to time each entry, and to make each store.
    seconds
        How long an epoch is followed.
    timeout
        Seconds until a process is ended.
    seed
        The order of entries and the seeds of loaders follow from it.
    """

    output: Path
    n_rounds: int
    seconds: float
    n_conversions: int
    timeout: float
    seed: int


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
    plan
        How long, how often, and where logs go.
    collection, stores, interpreters
        What is read, and by whom.
    """

    def __init__(
        self, plan: Plan, collection: Collection, stores: Stores, interpreters: Interpreters
    ):
        self._plan, self._collection = plan, collection
        self._stores, self._interpreters = stores, interpreters
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
        order = np.random.default_rng([self._plan.seed, number]).permutation(len(results))
        return [results[i] for i in order]

    def _run(self, result: Result, number: int) -> None:
        try:
            answer = self._answer(result, number)
        except FailedError as failure:
            result.error = str(failure)
            say(f"round {number}: {result.entry.name}: failed: {failure}")
            return
        result.packages = answer.pop("packages", {})
        if number == 0:
            result.is_sound = True
            say(f"round 0: {result.entry.name}: checked")
        else:
            result.rounds[number] = answer
            say(f"round {number}: {result.entry.name}: {result.speeds()[number]:,.0f} cells/s")

    def _answer(self, result: Result, number: int) -> dict:
        """Run an entry in a fresh process and return what it measured."""
        entry = result.entry
        reason = self._stores.why_not(entry.storage)
        if reason is not None:
            raise FailedError(reason)
        interpreter = self._interpreters.of(entry.environment)
        script = "limits.py" if entry.is_limit else "loaders.py"
        log = self._plan.output / "logs" / f"{_file_name(entry.name)}-{number}.err"
        fingerprints = log.with_suffix(".npy") if number == 0 else None
        self.cache = processes.drop_pages([self._stores.path(entry.storage)])
        outcome = processes.run(
            [interpreter, JOBS / script, json.dumps(self._job(entry, number, fingerprints))],
            timeout=self._plan.timeout,
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
            "peer": entry.peer,
            "plates": [str(plate) for plate in self._collection.plates],
            "store": str(self._stores.path(entry.storage)),
            "label": self._collection.label,
            "batch_size": entry.batch_size,
            "seconds": self._plan.seconds * share,
            "seed": 1_000 * self._plan.seed + number,
            "settings": entry.settings,
            "fingerprints": None if fingerprints is None else str(fingerprints),
        }


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


Results = Mapping[str, Result]


@dataclass(frozen=True)
class Estimate:
    """A median and how sure it is.

    Attributes
    ----------
    value
        Median of the samples.
    low, high
        The bootstrap's 95 % interval; of fewer than five samples the smallest and the largest.
    n_samples
        How many there were.
    """

    value: float
    low: float
    high: float
    n_samples: int


def median_with_interval(samples: Sequence[float]) -> Estimate | None:
    """Return the median of some samples with its interval, None if there are no samples."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        return None
    if values.size < FEWEST_FOR_BOOTSTRAP:
        low, high = values.min(), values.max()
    else:
        draws = np.random.default_rng(0).choice(values, size=(N_RESAMPLES, values.size))
        low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return Estimate(float(np.median(values)), float(low), float(high), values.size)


def interval_name(n_samples: int) -> str:
    """Say what the interval of so many samples is."""
    if n_samples < FEWEST_FOR_BOOTSTRAP:
        return "smallest and largest"
    return "95 % bootstrap interval"


def speed(result: Result) -> Estimate | None:
    """Return cells per second."""
    return median_with_interval(list(result.speeds().values()))


def first_minibatch_seconds(result: Result) -> Estimate | None:
    """Return the seconds from asking for an epoch to its first minibatch."""
    values = (each.get("first_minibatch_seconds") for each in result.rounds.values())
    return median_with_interval([value for value in values if value is not None])


def gigabytes_per_second(result: Result) -> Estimate | None:
    """Return how much a limit moved, None for a loader."""
    rounds = result.rounds.values()
    return median_with_interval([r["bytes"] / r["seconds"] / 1e9 for r in rounds if "bytes" in r])


def ratio(ours: Result, theirs: Result) -> Estimate | None:
    """Return how many times as fast the one is as the other, from rounds that both have."""
    our, their = ours.speeds(), theirs.speeds()
    return median_with_interval([our[number] / their[number] for number in our if number in their])


def versus_cellfeed(result: Result, results: Results) -> Estimate | None:
    """Return how many times as fast cellfeed is that does the same work."""
    ours = results.get(result.entry.versus or "")
    return None if ours is None else ratio(ours, result)


def lowest_limit(result: Result, results: Results) -> Result | None:
    """Return the limit that bounds an entry the most, of those that were measured."""
    limits = [results[name] for name in result.entry.limits if name in results]
    measured = [limit for limit in limits if limit.rounds]
    return min(measured, key=lambda limit: speed(limit).value, default=None)


def fastest(names: Iterable[str], results: Results) -> Result | None:
    """Return the fastest of some entries, of those that were measured."""
    measured = [results[name] for name in names if name in results and results[name].rounds]
    return max(measured, key=lambda result: speed(result).value, default=None)


def measuring_code() -> str:
    """Return a fingerprint of the code that times loaders and summarises rounds.

    It is stored with the figures, and a test compares it. Entries are not in it: another one does
    not change the figures of others.
    """
    found = hashlib.blake2b(digest_size=8)
    for name in MEASURING:
        found.update((JOBS.parent / name).read_bytes())
    return found.hexdigest()
