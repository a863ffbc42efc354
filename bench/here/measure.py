"""Run the comparison on this machine: each entry after the other, saved after each.

What measures is `bench/peers`, unchanged: its entries, environments, stores, checks and rounds.
"""

import contextlib
import datetime as dt
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import numpy as np
from bench.here import document, machine
from bench.here.document import Comparison, Entry, Measurement

from cellfeed import ParameterError
from cellfeed.synthetic import write_tahoe_like
from cellfeed_tuner._measuring._page_cache import resident_fraction

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))  # whose modules import each other so

import compare
import entries as rows
import processes
import rounds
from collection import Collection, open_collection
from conversions import Stores
from processes import FailedError, Interpreters, say
from rounds import Plan, Result, Runner


@dataclass(frozen=True)
class Profile:
    """How much to measure.

    Attributes
    ----------
    cells
        Of the synthetic collection.
    rounds, seconds, timeout
        Timed rounds, how long an epoch is followed in each, and when a process is ended.
    names
        Entries, each with that of cellfeed doing the same work; None for all.
    """

    cells: int
    rounds: int
    seconds: float
    timeout: float
    names: tuple[str, ...] | None


# The pairs of the README, and two limits.
SHORT_NAMES = (
    "AnnLoader, CSR",
    "scDataset, block 16, fetch 256, CSR, 0 workers",
    "scDataset, block 16, fetch 256, dense made of each minibatch, 0 workers",
    "cellstream, 16,384 random cells at a time, CSR",
    "annbatch, chunk 512, preload 32, CSR (defaults but for minibatches of 64)",
    rows.decompression("h5ad", 16),
    rows.disk("h5ad"),
)
PROFILES = {
    "short": Profile(cells=100_000, rounds=3, seconds=3.0, timeout=120.0, names=SHORT_NAMES),
    "full": Profile(cells=200_000, rounds=5, seconds=10.0, timeout=300.0, names=None),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for on the command line.

    Attributes
    ----------
    output
        Folder for files, cells, stores and logs.
    profile
        "short" or "full"; ``cells``, ``n_rounds`` and ``seconds`` are its own where None.
    peers
        Only these, separated by commas; all if None.
    collection
        Folder of plates to read; None for synthetic ones.
    label
        Column of ``obs`` that loaders deliver too.
    seed
        Of orders.
    environments, python312
        As of ``bench/peers/compare.py``.
    command
        As typed.
    """

    output: Path
    profile: str
    cells: int | None
    n_rounds: int | None
    seconds: float | None
    peers: str | None
    collection: Path | None
    label: str
    seed: int
    environments: Path
    python312: Path | None
    command: str


def chosen_entries(request: Request) -> list[rows.Entry]:
    """Return the entries to measure, in the order of the table.

    Raises
    ------
    ParameterError
        No peer has such a name.
    """
    names = PROFILES[request.profile].names
    wanted = [
        each
        for each in compare.choose(request.peers, "")
        if not each.is_limit and (names is None or each.name in names)
    ]
    if not wanted:
        msg = f"the {request.profile} profile has no loader of `{request.peers}`"
        raise ParameterError(f"{msg}; leave --peers out, or give --profile full")
    loaders = {each.name for each in wanted} | {each.versus for each in wanted}
    storages = {each.storage for each in rows.all_entries() if each.name in loaders}
    return [
        each
        for each in rows.all_entries()
        if each.name in loaders
        or (each.is_limit and each.storage in storages and (names is None or each.name in names))
    ]


def _plates(request: Request, profile: Profile) -> Path:
    """Return the folder of the cells, written first if they are synthetic and not there yet."""
    if request.collection is not None:
        if request.cells is not None:
            raise ParameterError("--cells is for synthetic cells; leave it or --collection out")
        return request.collection
    n_cells = request.cells or profile.cells
    folder = request.output / f"plates-{n_cells}"
    say(f"{n_cells:,} synthetic cells in {folder} ...")
    with click.progressbar(length=n_cells, file=sys.stderr) as bar:
        write_tahoe_like(folder, n_cells=n_cells, on_progress=lambda n: bar.update(n - bar.pos))
    return folder


def _environments(
    entries: list[rows.Entry], interpreters: Interpreters
) -> Iterator[document.Environment]:
    """Make the environments of entries, and describe each; one that fails is described so."""
    yield machine.own_environment()
    for name in sorted({each.environment for each in entries if each.environment}):
        say(f"Environment of {name}: the first time, its packages are downloaded ...")
        try:
            yield machine.environment_of(name, interpreters.of(name))
        except FailedError as error:
            say(f"Environment of {name}: {error}")
            yield document.Environment(name=name, python=None, packages={}, failed=str(error))


def _new(
    request: Request,
    plan: Plan,
    collection: Collection,
    entries: list[rows.Entry],
    environments: list[document.Environment],
) -> Comparison:
    """Return a comparison without measurements."""
    names = {each.name for each in entries}
    return Comparison(
        format=document.FORMAT,
        complete=False,
        command=request.command,
        started=_now(),
        updated=_now(),
        interruptions=0,
        settings=document.Settings(
            profile=request.profile,
            rounds=plan.n_rounds,
            seconds=plan.seconds,
            seed=plan.seed,
            timeout_seconds=plan.timeout,
            entries=[each.name for each in entries],
            left_out=[each.name for each in rows.all_entries() if each.name not in names],
        ),
        code=machine.code_of(rounds.measuring_code()),
        machine=machine.machine_of(collection.folder),
        cells=document.Cells(
            n_cells=collection.n_cells,
            n_genes=collection.n_genes,
            n_nonzero=collection.n_nonzero,
            n_files=len(collection.plates),
            n_bytes=collection.n_bytes,
            label=collection.label,
            synthetic=request.collection is None,
            sha256=hashlib.sha256(collection.fingerprints.tobytes()).hexdigest(),
        ),
        environments=environments,
        conversions=[],
        entries=[],
    )


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _unfinished(new: Comparison, folder: Path) -> tuple[Path, Comparison] | None:
    """Return the latest unfinished file that a comparison continues, if there is one."""
    for path in sorted(folder.glob("comparison-*.json"), reverse=True):
        with contextlib.suppress(ParameterError):  # damaged, or of another format
            old = document.read(path)
            same = (old.settings, old.code, old.cells, old.machine.processor.model) == (
                new.settings, new.code, new.cells, new.machine.processor.model
            )  # fmt: skip
            if same and not old.complete:
                return path, old
    return None


class Session:
    """A comparison that is being made: what was measured, and the file that has it.

    Parameters
    ----------
    plan, collection, stores, interpreters
        As of `Runner`.
    entries
        What to measure.
    comparison
        Everything that is known before the first measurement.

    Attributes
    ----------
    path
        The file. An unfinished one of the same request, code and cells is continued.
    """

    def __init__(
        self,
        plan: Plan,
        collection: Collection,
        stores: Stores,
        interpreters: Interpreters,
        entries: list[rows.Entry],
        comparison: Comparison,
    ):
        self._plan, self._stores = plan, stores
        self._runner = Runner(plan, collection, stores, interpreters)
        self._results = {each.name: Result(each) for each in entries}
        self._states: dict[tuple[str, int], dict] = {}
        self._comparison = comparison
        found = _unfinished(comparison, plan.output)
        if found is None:
            stem = f"comparison-{comparison.started[:19].replace(':', '')}"
            self.path = plan.output / f"{stem}.json"
        else:
            self.path, old = found
            self._comparison = msgspec.structs.replace(
                comparison, started=old.started, interruptions=old.interruptions + 1
            )
            self._restore(old)
            say(f"Continuing {self.path}")

    @classmethod
    def begin(cls, request: Request) -> "Session":
        """Make cells, environments and stores, as far as they are not there yet.

        Raises
        ------
        ParameterError
            The request cannot be met.
        """
        profile = PROFILES[request.profile]
        entries = chosen_entries(request)
        plan = Plan(
            output=request.output,
            n_rounds=request.n_rounds or profile.rounds,
            seconds=request.seconds or profile.seconds,
            n_conversions=1,
            timeout=profile.timeout,
            seed=request.seed,
        )
        request.output.mkdir(parents=True, exist_ok=True)
        collection = open_collection(_plates(request, profile), request.label)
        pythons = {"3.12": request.python312} if request.python312 else {}
        interpreters = Interpreters(request.environments, pythons)
        environments = list(_environments(entries, interpreters))
        stores = compare.convert(plan, collection, entries, interpreters)
        new = _new(request, plan, collection, entries, environments)
        return cls(plan, collection, stores, interpreters, entries, new)

    def measure(self) -> None:
        """Check each loader, then time all in rounds; save after each."""
        n_rounds, n_done, start = self._plan.n_rounds, 0, time.monotonic()
        for number in range(n_rounds + 1):
            due = self._due(number)
            for place, result in enumerate(due):
                n_left = len(due) - place
                if number == 0:  # what passes takes part in all rounds
                    n_left *= 1 + n_rounds
                n_left += sum(len(self._due(each)) for each in range(number + 1, n_rounds + 1))
                minutes = (time.monotonic() - start) / max(1, n_done) * n_left / 60
                say(f"{n_left} left" + (f", about {minutes:.0f} min" if n_done else ""))
                self._measure(result, number)
                self.save()
                n_done += 1
        self._comparison = msgspec.structs.replace(self._comparison, complete=True)
        self.save()

    def _due(self, number: int) -> list[Result]:
        """Return what a round still has to measure, in random order; round 0 checks loaders."""
        order = np.random.default_rng([self._plan.seed, number]).permutation(len(self._results))
        shuffled = (list(self._results.values())[i] for i in order)
        if number == 0:
            return [each for each in shuffled if not (each.is_sound or each.entry.is_limit)]
        return [
            each
            for each in shuffled
            if (each.is_sound or each.entry.is_limit) and number not in each.rounds
        ]

    def _measure(self, result: Result, number: int) -> None:
        folder = self._stores.path(result.entry.storage)
        processes.drop_pages([folder])
        state = {
            "resident": resident_fraction([each for each in folder.rglob("*") if each.is_file()]),
            "busy": machine.busy_share(),
        }
        if len(result.rounds) == max(0, number - 1):
            result.error = None  # of an attempt that is now repeated
        if number == 0:
            self._runner.check([result])
        else:
            self._runner.time([result], number)
        self._states[result.entry.name, number] = state | {"page_cache": self._runner.cache}

    def _restore(self, old: Comparison) -> None:
        """Take what an earlier, interrupted run has measured."""
        for entry in old.entries:
            result = self._results[entry.name]
            result.is_sound, result.packages = entry.checked, entry.packages
            result.peak_bytes, result.error = entry.peak_bytes, entry.failed
            for each in entry.rounds:
                self._states[entry.name, each.round] = {
                    "resident": each.resident, "busy": each.busy, "page_cache": each.page_cache,
                }  # fmt: skip
                result.rounds[each.round] = {
                    "cells": each.cells,
                    "seconds": each.seconds,
                    "first_minibatch_seconds": each.first_minibatch_seconds,
                } | ({} if each.bytes_moved is None else {"bytes": each.bytes_moved})

    def save(self) -> None:
        """Write everything that was measured so far."""
        document.write(
            self.path,
            msgspec.structs.replace(
                self._comparison,
                updated=_now(),
                conversions=[
                    document.Conversion(
                        title=store.conversion.title,
                        storage=store.conversion.storage,
                        failed=store.error,
                        runs=[document.ConversionRun(**each) for each in store.runs],
                    )
                    for store in self._stores.all.values()
                ],
                entries=[self._entry(each) for each in self._results.values()],
            ),
        )

    def _entry(self, result: Result) -> Entry:
        entry = result.entry
        # The lowest of some limits is none if another one was left out.
        is_bounded = set(entry.limits) <= set(self._results)
        limit = rounds.lowest_limit(result, self._results) if is_bounded else None
        return Entry(
            name=entry.name,
            peer=entry.peer,
            section=entry.section,
            storage=rows.STORAGE_NAMES[entry.storage],
            output=entry.output,
            environment=entry.environment,
            settings=entry.settings,
            batch_size=entry.batch_size,
            checked=result.is_sound,
            failed=result.error,
            packages=result.packages,
            peak_bytes=result.peak_bytes,
            cells_per_s=_estimate(rounds.speed(result)),
            first_minibatch_s=_estimate(rounds.first_minibatch_seconds(result)),
            compared_with=entry.versus,
            speedup=_estimate(rounds.versus_cellfeed(result, self._results)),
            limit=None if limit is None else limit.entry.name,
            of_limit=None if limit is None else _estimate(rounds.ratio(result, limit)),
            rounds=[self._measurement(result, number) for number in sorted(result.rounds)],
        )

    def _measurement(self, result: Result, number: int) -> Measurement:
        found: Mapping = result.rounds[number]
        return Measurement(
            round=number,
            cells=found["cells"],
            seconds=found["seconds"],
            cells_per_s=found["cells"] / found["seconds"],
            first_minibatch_seconds=found.get("first_minibatch_seconds"),
            bytes_moved=found.get("bytes"),
            **self._states[result.entry.name, number],
        )


def _estimate(found: rounds.Estimate | None) -> document.Estimate | None:
    if found is None:
        return None
    return document.Estimate(
        value=found.value, low=found.low, high=found.high, n_rounds=found.n_samples
    )
