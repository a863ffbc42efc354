"""Measure a whole grid, in several interleaved runs: as a function, and from the command line.

A recording is two files: the measurements as CSV, and the circumstances as JSON.
"""

import csv
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, Self

import click
import numpy as np
from bench.backtest.recorded_grid import SCHEMA, SETTINGS, facts_path, read_facts

from cellfeed import Collection, FormatError, ParameterError, open_collection
from cellfeed.console import OneLineErrorCommand, interrupted
from cellfeed.machine import usable_memory_bytes
from cellfeed_tuner._choose import Requirements
from cellfeed_tuner._commands._autotune_cli import Sizes, listed
from cellfeed_tuner._commands._autotune_run import LiveDisplay
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_ENTROPY_FLOOR,
    DEFAULT_FETCH_FACTORS,
)
from cellfeed_tuner._fingerprints import data_fingerprint, machine_fingerprint, versions_fingerprint
from cellfeed_tuner._machine import describe_machine
from cellfeed_tuner._measuring._measurement import Measurement, measure_with
from cellfeed_tuner._measuring._page_cache import (
    CacheState,
    cache_state,
    prepare_cache,
)
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest
from cellfeed_tuner._mixing import Mixing
from cellfeed_tuner._request import check_size, default_workers, describe_dataset
from cellfeed_tuner._result import to_plain
from cellfeed_tuner._results import Constraints
from cellfeed_tuner._searching._space import MOST_LISTED, Space
from cellfeed_tuner._subject import BlockPlans, Label, Selected
from cellfeed_tuner._time_budget import Progress, silent

# The least a throughput is computed from, over all runs together.
_LEAST_ROUNDS = 8
# A run of a configuration that takes longer is stopped.
_LIMIT_SECONDS = 120.0
# Facts that must be equal to continue a recording.
_SAME = (
    *("fingerprints", "label", "batch_size", "block_sizes", "fetch_factors", "workers", "cache"),
    "seed",
)
_COLUMNS = (
    *("run", *SETTINGS, "cells_per_second", "entropy_bits"),
    *("n_rounds", "round_spread", "peak_memory_bytes"),
)


@dataclass(slots=True, kw_only=True)
class Recording:
    """A recording in progress; every row is written to disk immediately.

    Parameters
    ----------
    path
        The CSV file; a JSON file of the same name lies beside it.
    facts
        What is measured and under which circumstances; plain values.
    done
        Runs and configurations that are measured.
    left_out
        Configurations that cannot be measured, and why.
    sittings
        The calls that measured, each until it finished or was interrupted: when it ``began``, the
        ``load`` average of the machine in the minute before, for how many ``seconds`` it measured,
        and how many rows it added (``n_measured``).
    """

    path: Path
    facts: Mapping[str, Any]
    done: set[tuple[int, Configuration]] = field(default_factory=set)
    left_out: dict[Configuration, str] = field(default_factory=dict)
    sittings: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, facts: Mapping[str, Any], same: Sequence[str]) -> Self:
        """Continue an existing recording, or begin one.

        Parameters
        ----------
        path
            The CSV file.
        facts
            What is to be measured and under which circumstances.
        same
            Names of facts that must equal those of an existing recording.

        Raises
        ------
        ParameterError
            A different recording exists at the path.
        FormatError
            The existing recording cannot be read.
        """
        if not path.exists():
            recording = cls(path=path, facts=facts)
            with path.open("x", newline="") as file:
                csv.writer(file).writerow(_COLUMNS)
            recording.save()
            return recording
        known = read_facts(path)
        if known is None:
            msg = f"{path}: there is no {facts_path(path).name} beside it, so it cannot continue"
            raise ParameterError(f"{msg}; give another --out")
        for name in same:
            if known.get(name) != facts[name]:
                msg = (
                    f"{path}: was recorded with another {name} ({known.get(name)}, now "
                    f"{facts[name]}); delete it, or give another --out"
                )
                raise ParameterError(msg)
        try:
            with path.open(newline="") as file:
                done = {(int(row["run"]), _settings(row)) for row in csv.DictReader(file)}
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path}: not a recording: {error!r}; delete it, or give another --out"
            raise FormatError(msg) from error
        left_out = {_settings(each): each["why"] for each in known["left_out"]}
        return cls(path=path, facts=known, done=done, left_out=left_out, sittings=known["sittings"])

    @property
    def seconds(self) -> float:
        """Seconds spent measuring so far."""
        return float(sum(each["seconds"] for each in self.sittings))

    def add(
        self, run: int, configuration: Configuration, found: Measurement, entropy_bits: float
    ) -> None:
        """Write the row of one run of one configuration, whose entropy is the expected one."""
        seconds = np.array(found.round_seconds)
        spread = seconds.std(ddof=1) / seconds.mean() if seconds.size > 1 else 0
        row = (
            *(run, *(configuration[name] for name in SETTINGS)),
            *(f"{found.cells_per_round / seconds.mean():.1f}", f"{entropy_bits:.4f}"),
            *(seconds.size, f"{spread:.4f}", found.peak_memory_bytes),
        )
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(row)
        self.done.add((run, configuration))

    def save(self) -> None:
        """Write everything but the rows."""
        left_out = [dict(each) | {"why": why} for each, why in sorted(self.left_out.items())]
        facts = dict(self.facts) | {"left_out": left_out, "sittings": self.sittings}
        target = facts_path(self.path)
        unfinished = target.with_suffix(".json.unfinished")
        unfinished.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
        unfinished.replace(target)


def _settings(row: Mapping[str, Any]) -> Configuration:
    return Configuration(**{name: int(row[name]) for name in SETTINGS})


def record(
    collection: Collection,
    *,
    label: str,
    output: Path | str,
    runs: int = 3,
    batch_size: int = 64,
    block_sizes: Sequence[int] = DEFAULT_BLOCK_SIZES,
    fetch_factors: Sequence[int] = DEFAULT_FETCH_FACTORS,
    workers: Sequence[int] | None = None,
    cache: CacheState | None = None,
    seed: int = 0,
    note: str = "",
    on_progress: Progress = silent,
) -> Recording:
    """Measure every configuration of a grid, to replay searches on it; see `replay`.

    The grid is measured once per run, each time in another random order, so that changes of the
    machine's load affect all configurations alike. Each row is written as soon as it is measured:
    the same call continues an interrupted recording, and a call with more runs adds to it.

    Parameters
    ----------
    collection
        The collection, opened with ``obs=[label]``.
    label
        The obs column that minibatches should mix.
    output
        The CSV file to write, one row per run of a configuration: ``run``,
        ``block_size``, ``fetch_factor``, ``num_workers``, ``cells_per_second``,
        ``entropy_bits`` (expected, from the plan over the labels), ``n_rounds``,
        ``round_spread`` (standard deviation of the rounds' times, relative) and
        ``peak_memory_bytes``. A JSON file of the same name describes the circumstances.
    runs
        How often to measure the grid.
    batch_size
        Cells of a minibatch.
    block_sizes, fetch_factors, workers
        The grid. If None, workers are 0 and the powers of two up to the usable cores, or only 0
        for files on servers. A `range` stands for all integers in it.
    cache
        "cold" drops the files' pages before each measurement, "warm" reads all files first; None
        is "cold", or "remote" for files on servers.
    seed
        Seed of the plans and of the orders.
    note
        A remark on the circumstances, such as what else the machine is doing.
    on_progress
        Called with the progress of each run.

    Raises
    ------
    ColumnError
        The collection was opened without the label, or it has fewer than two values.
    ParameterError
        A size is too small, there are more than 2,000 configurations, the collection is too small
        to time anything, "warm" was requested for files that do not fit in memory, or a different
        recording exists at ``output``.
    FormatError
        A file is damaged, or the recording at ``output`` is.
    MeasuringError
        The process that times configurations died.
    """
    if runs < 1:
        msg = f"`runs >= 1` must hold, but got runs={runs}"
        raise ParameterError(msg)
    column = Selected.of(collection).label(label)
    space = Space.of(
        block_sizes, fetch_factors, default_workers(collection) if workers is None else workers
    )
    if space.is_large:
        msg = (
            f"every configuration is measured, {MOST_LISTED:,} at most, but these are "
            f"{space.size:,}; give fewer block sizes, fetch factors or workers"
        )
        raise ParameterError(msg)
    grid = space.grid()
    check_size("the collection", len(collection), grid, batch_size)
    cache = cache_state(collection, cache)
    on_progress("machine", 0, 1)
    facts = _facts(collection, column, batch_size) | {
        "note": note,
        "block_sizes": list(space.block_sizes),
        "fetch_factors": list(space.fetch_factors),
        "workers": list(space.workers),
        "cache": prepare_cache(collection.files, cache),
        "seed": seed,
    }
    recording = Recording.open(Path(output), facts, _SAME)
    requirements = Requirements(
        n_cells=len(collection),
        row_bytes=collection.mean_row_bytes(),
        batch_size=batch_size,
        constraints=Constraints(
            entropy_floor=0.0, memory_bytes=usable_memory_bytes(), need_cells_per_second=None
        ),
        entropies=lambda _: {},
    )
    for each in grid:
        reason = requirements.obstacle(each)
        if reason is not None:
            recording.left_out[each] = ": ".join(reason)
    with MeasuringProcess(collection) as process:  # imports continue alongside the next lines
        plans = BlockPlans(len(collection), batch_size=batch_size, seed=seed)
        mixing = Mixing([column], plans, entropy_floor=DEFAULT_ENTROPY_FLOOR)
        mixing.replay(grid, on_progress)
        on_progress("start", 0, 1)
        process.start()
        recorder = Recorder(
            process=process,
            recording=recording,
            entropies={
                sizes: mixing[sizes][label].expected.value
                for sizes in product(space.block_sizes, space.fetch_factors)
            },
            common={
                "batch_size": batch_size,
                "labels": (label,),
                "cache": cache,
                "seed": seed,
                "least_rounds": ceil(_LEAST_ROUNDS / runs),
            },
            on_progress=on_progress,
        )
        recorder.measure(grid, runs)
    return recording


def _facts(collection: Collection, label: Label, batch_size: int) -> dict[str, Any]:
    """Return what is measured and under which circumstances, without paths."""
    machine, versions = describe_machine(collection.files), versions_fingerprint()
    counted = {label.name: label.counted}
    dataset = asdict(describe_dataset(Selected.of(collection), counted, batch_size))
    paths = dataset.pop("paths")
    # It names paths; and all cells are visited, by cellfeed.
    del dataset["slow_reading"], dataset["selection"], dataset["loader"]
    return {
        "schema": SCHEMA,
        "label": label.name,
        "batch_size": batch_size,
        "random_entropy_bits": label.counted.random_entropy_bits(batch_size),
        "dataset": dataset | {"n_files": len(paths), "codecs": sorted({*collection.codecs})},
        "machine": to_plain(machine),
        "versions": dict(versions.facts),
        "fingerprints": {
            "data": data_fingerprint(collection, label.codes).digest,
            "machine": machine_fingerprint(machine).digest,
            "versions": versions.digest,
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """Measures what is missing, and stores it.

    Parameters
    ----------
    process
        Where configurations run.
    recording
        What is recorded already, and where to store the rest.
    entropies
        Label entropy in bits for each (block size, fetch factor).
    common
        What all requests to time a configuration have in common; the seed is of the orders too.
    on_progress
        Called with the progress of each run.
    clock
        A clock, in seconds.
    """

    process: MeasuringProcess
    recording: Recording
    entropies: Mapping[tuple[int, int], float]
    common: Mapping[str, Any]
    on_progress: Progress = silent
    clock: Callable[[], float] = time.monotonic

    def measure(self, grid: Sequence[Configuration], n_runs: int) -> None:
        """Measure the grid this many times, except what was measured already."""
        began = datetime.now(UTC).isoformat(timespec="seconds")
        sitting: dict[str, Any] = {"began": began, "load": os.getloadavg()[0], "seconds": 0.0}
        sitting["n_measured"] = 0
        self.recording.sittings.append(sitting)
        start = self.clock()
        try:
            for run, number, configuration in self._missing(grid, n_runs):
                request = TimingRequest(configuration=configuration, number=number, **self.common)
                found = measure_with(self.process, request, limit_seconds=_LIMIT_SECONDS)
                if problem := _problem(found, request.least_rounds):
                    self.recording.left_out[configuration] = problem
                else:
                    sizes = configuration.block_size, configuration.fetch_factor
                    self.recording.add(run, configuration, found, self.entropies[sizes])
                sitting["n_measured"] += 1
                sitting["seconds"] = self.clock() - start
        finally:
            self.recording.save()

    def _missing(
        self, grid: Sequence[Configuration], n_runs: int
    ) -> Iterator[tuple[int, int, Configuration]]:
        """Yield the number of a run, that of the measurement, and the configuration."""
        known = self.recording
        for run in range(n_runs):
            order = np.random.default_rng((self.common["seed"], run)).permutation(len(grid))
            for number, place in enumerate(order.tolist()):
                self.on_progress(f"Run {run + 1} of {n_runs}", number, len(grid))
                each = grid[place]
                if each not in known.left_out and (run, each) not in known.done:
                    yield run, run * len(grid) + place, each


def _problem(found: Measurement, least_rounds: int) -> str:
    """Return why there is no throughput, or nothing."""
    if found.failure:
        return f"failed: {found.failure}"
    if found.delivery_fault:
        return f"wrong loader: {found.delivery_fault}"
    if len(found.round_seconds) < least_rounds:
        return f"not enough samples in {_LIMIT_SECONDS:.0f} s"
    return ""


@click.command("record", cls=OneLineErrorCommand)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--label", required=True, metavar="COLUMN", help="obs column to mix minibatches by.")
@click.option("--out", "output", required=True, metavar="GRID.csv",
              type=click.Path(dir_okay=False, path_type=Path),
              help="File to write; an interrupted recording there continues.")  # fmt: skip
@click.option("--runs", default=3, show_default=True, type=click.IntRange(min=1),
              help="How often to measure the grid, each time in another order.")  # fmt: skip
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1),
              help="Cells of a minibatch.")  # fmt: skip
@click.option("--block-sizes", default=DEFAULT_BLOCK_SIZES, type=Sizes(1),
              show_default=listed(DEFAULT_BLOCK_SIZES), help="Block sizes.")  # fmt: skip
@click.option("--fetch-factors", default=DEFAULT_FETCH_FACTORS, type=Sizes(1),
              show_default=listed(DEFAULT_FETCH_FACTORS), help="Fetch factors.")  # fmt: skip
@click.option("--workers", type=Sizes(0), show_default="0 and powers of two up to the cores",
              help="Numbers of worker processes.")  # fmt: skip
@click.option("--cache", default=None, show_default="cold", type=click.Choice(["cold", "warm"]),
              help="State of the page cache to measure in; not for files on servers.")  # fmt: skip
@click.option("--note", default="", metavar="TEXT",
              help="A remark on the circumstances to store.")  # fmt: skip
def record_command(*, paths: tuple[str, ...], label: str, output: Path, **settings: Any) -> None:
    """Measure the whole grid, to replay searches on it; this takes long.

    Each row of GRID.csv is one run of one configuration, written as soon as it is
    measured. GRID.json describes the circumstances. The same command continues an
    interrupted recording.
    """
    collection = open_collection(paths, obs=[label])
    try:
        with LiveDisplay() as display:
            recording = record(
                collection, label=label, output=output, on_progress=display.show, **settings
            )
    except KeyboardInterrupt:
        interrupted(
            f"Interrupted. {output} holds the measurements so far; the same command continues."
        )
    measured = {each for _, each in recording.done}
    n, n_runs = len(measured) + len(recording.left_out), settings["runs"]
    click.echo(f"Measured {len(measured)} of {n} configurations, {n_runs} times each, in "
               f"{recording.seconds:,.0f} s.")  # fmt: skip
    reasons = Counter(why.partition(":")[0] for why in recording.left_out.values())
    for why, count in reasons.most_common():
        click.echo(f"Left out: {count} ({why})")
    click.echo(f"Wrote {recording.path}, {facts_path(recording.path)}")
