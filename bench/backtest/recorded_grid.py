"""A recorded grid, and a machine that answers from it."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed import FormatError
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._process import Outcome
from cellfeed_tuner._measuring._timing import (
    CountedRounds,
    Findings,
    Round,
    Started,
    TimingRequest,
)
from cellfeed_tuner._results import least_share

SCHEMA = "cellfeed.recording/1"
SETTINGS = ["block_size", "fetch_factor", "num_workers"]
# Relative spread of the rounds within one measurement, and seconds of a measurement beside its
# rounds. Measured: on two cores; processes start, and open the files.
_ROUND_SPREAD, _OVERHEAD_SECONDS = 0.03, 0.25
MANY_CELLS = 1 << 60
_USUAL_SPREAD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGrid:
    """Throughputs of block shuffling that were recorded before.

    Parameters
    ----------
    configurations
        The measured configurations.
    runs
        Cells per second in each run of each, shape (number of its runs,).
    entropies
        Minibatch label entropy of each, in bits.
    random_entropy
        Entropy of true random sampling, in bits.
    batch_size
        Cells of a minibatch.
    peak_memory_bytes
        Peak memory of each; None if not recorded.
    n_cells
        Cells of the collection; very many if that was not recorded.
    memory_limit
        Bytes that a configuration may take.
    """

    configurations: tuple[Configuration, ...]
    runs: tuple[NDArray[np.float64], ...]
    entropies: tuple[float, ...]
    random_entropy: float
    batch_size: int
    peak_memory_bytes: tuple[float, ...] | None
    n_cells: int = MANY_CELLS
    memory_limit: int = 1 << 60  # recordings do not say how much there was, so nothing is too much

    def __len__(self) -> int:
        return len(self.configurations)

    def cells_per_second(self) -> dict[Configuration, float]:
        """Return the throughput of each configuration over all of its runs."""
        means = [float(1 / np.mean(1 / each)) for each in self.runs]
        return dict(zip(self.configurations, means, strict=True))

    def feasible(self, floor: float) -> list[Configuration]:
        """Return the configurations that mix well enough, by the rule of the search, and fit."""
        least = least_share(floor) * self.random_entropy
        pairs = zip(self.configurations, self.entropies, strict=True)
        return [
            each
            for each, entropy in pairs
            if entropy >= least and self.memory_bytes(each) <= self.memory_limit
        ]

    def replicate_spread(self) -> float:
        """Return the spread of runs of one configuration, relative to their mean.

        Estimated over all configurations; 5 % if each was run once.
        """
        freedom = sum(each.size - 1 for each in self.runs)
        squares = sum(float(((each / each.mean() - 1) ** 2).sum()) for each in self.runs)
        return (squares / freedom) ** 0.5 if freedom else _USUAL_SPREAD

    def memory_bytes(self, configuration: Configuration) -> int:
        """Return the peak memory of a configuration; if not recorded, a size proportional to it."""
        if self.peak_memory_bytes is None:
            return configuration.minibatches_in_memory * self.batch_size
        return int(self.peak_memory_bytes[self.configurations.index(configuration)])


def facts_path(path: Path) -> Path:
    """Return the path of the facts that belong to a recorded grid."""
    return path.with_suffix(".json")


def read_facts(path: Path) -> dict[str, Any] | None:
    """Return the facts of a recorded grid, or None if there are none.

    Raises
    ------
    FormatError
        The file is not JSON, or not a recording.
    """
    beside = facts_path(path)
    if not beside.is_file():
        return None
    try:
        facts = json.loads(beside.read_text())
    except ValueError as error:
        msg = f"{beside}: not JSON: {error}; delete it, or give the grid another name"
        raise FormatError(msg) from error
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        msg = f"{beside}: its schema is not {SCHEMA}; delete it, or give the grid another name"
        raise FormatError(msg)
    return facts


def read_grid(path: str | os.PathLike[str]) -> RecordedGrid:
    """Read a recorded grid from a CSV file.

    Parameters
    ----------
    path
        A table with columns ``block_size``, ``fetch_factor``, ``cells_per_second``,
        ``entropy_bits``, and optionally ``num_workers`` (default 0). Rows without a block size or a
        fetch factor are skipped, and if there is a column ``strategy``, all rows but
        "BlockShuffling". Several rows of one configuration are several runs of it. If `record`
        wrote it, its column ``peak_memory_bytes`` and the file beside it are used too: the entropy
        of random sampling, the number of cells, and the batch size. Otherwise random sampling's
        entropy is what was recorded at block size 1, or else the highest, and minibatches have 64
        cells.

    Raises
    ------
    FormatError
        The file is not such a table.
    """
    path = Path(path)
    table, facts = _block_shuffling(path), read_facts(path)
    runs = table.groupby(SETTINGS, sort=True)
    configurations = [
        Configuration(block_size=int(block), fetch_factor=int(fetch), num_workers=int(workers))
        for block, fetch, workers in runs.size().index.to_list()
    ]
    entropies = runs["entropy_bits"].mean()
    at_random = entropies[entropies.index.get_level_values("block_size") == 1]
    random_entropy = float(entropies.max() if at_random.empty else at_random.mean())
    has_peaks = "peak_memory_bytes" in table
    return RecordedGrid(
        configurations=tuple(configurations),
        runs=tuple(part.to_numpy(np.float64) for _, part in runs["cells_per_second"]),
        entropies=tuple(entropies.tolist()),
        random_entropy=random_entropy if facts is None else facts["random_entropy_bits"],
        batch_size=64 if facts is None else facts["batch_size"],
        peak_memory_bytes=tuple(runs["peak_memory_bytes"].max()) if has_peaks else None,
        n_cells=MANY_CELLS if facts is None else facts["dataset"]["n_cells"],
    )


def _block_shuffling(path: Path) -> pd.DataFrame:
    """Return the columns that are used, of the rows of block shuffling, as float64."""
    try:
        table = pd.read_csv(path)
    except (ValueError, UnicodeDecodeError) as error:
        msg = f"{path}: not a CSV file: {error}"
        raise FormatError(msg) from error
    if "num_workers" not in table:
        table["num_workers"] = 0
    columns = [*SETTINGS, "cells_per_second", "entropy_bits"]
    if missing := sorted({*columns} - set(table)):
        msg = f"{path}: has no column {', '.join(missing)}"
        raise FormatError(msg)
    if "strategy" in table:
        table = table[table["strategy"] == "BlockShuffling"]
    table = table.dropna(subset=["block_size", "fetch_factor"]).fillna({"num_workers": 0})
    if table.empty:
        msg = f"{path}: has no row of block shuffling with a block size and a fetch factor"
        raise FormatError(msg)
    try:
        numbers = table[[*columns, *({"peak_memory_bytes"} & set(table))]].astype(np.float64)
    except ValueError as error:
        msg = f"{path}: a column holds something other than numbers: {error}"
        raise FormatError(msg) from error
    if not np.isfinite(numbers).all(axis=None) or not (numbers["cells_per_second"] > 0).all():
        msg = f"{path}: throughputs must be above 0, and no number may be missing"
        raise FormatError(msg)
    if not (numbers[SETTINGS] % 1 == 0).all(axis=None):
        msg = f"{path}: each of {', '.join(SETTINGS)} must be a whole number"
        raise FormatError(msg)
    return numbers


@dataclass(slots=True, kw_only=True)
class RecordedProcess:
    """A machine on which configurations are as fast as recorded.

    Its clock goes on as if it had measured. Each measurement has an independent error of the same
    size, so measuring in turns gains nothing here; on a real machine it cancels what the machine
    does at the moment.

    Parameters
    ----------
    grid
        The recording.
    spread
        Relative spread of measurements.
    rng
        The random generator.

    Attributes
    ----------
    now
        Seconds since it began.
    """

    grid: RecordedGrid
    spread: float
    rng: np.random.Generator
    now: float = field(default=0.0, init=False)
    _costs: dict[Configuration, float] = field(init=False)

    def __post_init__(self) -> None:
        speeds = self.grid.cells_per_second()
        self._costs = {each: 1 / speed for each, speed in speeds.items()}

    def seconds_per_cell(self) -> dict[Configuration, float]:
        """Return the time per cell of each configuration by this clock, without any error."""
        return dict(self._costs)

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now

    def start(self) -> None:
        """Do nothing: it is always ready."""

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        """Return what a process that times a configuration reports."""
        each = request.configuration
        cells = each.minibatches_per_round * request.batch_size
        cost = self._costs[each] * np.exp(self.spread * self.rng.standard_normal())
        n_new = CountedRounds.n_new(self.grid.n_cells // cells, has_workers=each.num_workers > 0)
        enough = min(request.most_rounds, math.ceil(request.seconds / (cells * cost)))
        n_rounds = n_new + max(request.least_rounds, enough)
        noise = np.exp(_ROUND_SPREAD * self.rng.standard_normal(n_rounds))
        ends = _OVERHEAD_SECONDS + np.cumsum(cells * cost * noise)
        n_ended = int(np.searchsorted(ends, limit_seconds, side="right"))
        self.now += min(limit_seconds, float(ends[-1]))
        rounds = np.diff(ends, prepend=_OVERHEAD_SECONDS)[:n_ended].tolist()
        return answered(rounds, n_new=n_new, peak_memory_bytes=self.grid.memory_bytes(each))


def answered(
    round_seconds: Sequence[float],
    *,
    n_new: int = 1,
    peak_memory_bytes: int,
    failure: str | None = None,
) -> Outcome:
    """Return what a process reports of rounds, of which the first ``n_new`` are not counted."""
    rounds = [Round(each, number >= n_new, each, None) for number, each in enumerate(round_seconds)]
    return Outcome(
        events=(Started(0.0, 0.0, 0), *rounds, Findings()) if rounds else (),
        peak_memory_bytes=peak_memory_bytes,
        failure=failure,
    )
