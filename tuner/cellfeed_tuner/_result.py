"""What ``autotune`` found, as records and as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from cellfeed import FormatError, PathError, __version__
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._epoch_course import EpochCourse
from cellfeed_tuner._entropy._storage_order import StorageOrder
from cellfeed_tuner._explain._bottleneck import Bottleneck
from cellfeed_tuner._explain._storage_advice import StorageAdvice
from cellfeed_tuner._history._recall import Earlier
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._machine._description import Machine
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._bytes_read import BytesRead
from cellfeed_tuner._records_from_json import record_from_json
from cellfeed_tuner._result_json import (
    bottleneck_json,
    configuration_json,
    course_json,
    flat,
    nested,
    recommended_json,
    storage_order_json,
)
from cellfeed_tuner._verdicts._verdict import Verdict

__all__ = [
    "SCHEMA",
    "AutotuneResult",
    "ConditionalEntropyBits",
    "ConfigurationResult",
    "Constraints",
    "Dataset",
    "EntropyBits",
    "LabelCensus",
    "LabelResult",
    "Nearest",
    "Ranges",
    "Recommended",
    "Status",
    "Waiting",
]

SCHEMA = "cellfeed.autotune/1"

Status = Literal[
    "measured",
    "not enough samples",  # timed, but for too few whole fetches
    "too few cells",  # an epoch holds too few whole fetches to time any
    "over memory",  # its buffers alone exceed the memory given
    "too slow",  # not timed, since by its like it cannot be the best
    "below entropy floor",  # not timed, since it mixes too little to be chosen
    "out of budget",  # not timed for want of time
    "failed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBits:
    """Minibatch label entropy of one configuration, in bits.

    Parameters
    ----------
    measured
        Mean over the minibatches that came out, with its 95 % interval; None if none did.
    expected
        Mean over the plan's minibatches, replayed over the labels in their order of storage,
        with its 95 % interval.
    homogeneous
        Exact expectation if every block held one label; see `theory.expected_entropy_bits`.
    lower_bound, upper_bound
        The paper's bounds.
    random
        Exact expectation of true random sampling from these labels.
    """

    measured: Estimate | None
    expected: Estimate
    homogeneous: float
    lower_bound: float
    upper_bound: float
    random: float

    @property
    def share_of_random(self) -> float:
        """Expected entropy as a share of true random sampling's."""
        return self.expected.value / self.random if self.random else 1.0

    @property
    def verdict(self) -> str:
        """Whether the measured entropy (or the expected one) is inside the paper's bounds.

        "inside", or how far outside: "+0.010" above the upper bound, "-0.020" below the lower;
        "n/a" where so many labels meet so small a minibatch that the bounds say nothing.
        """
        if self.upper_bound <= 0:
            return "n/a"
        shown = self.expected
        if self.measured is not None and math.isfinite(self.measured.low):
            shown = self.measured
        if shown.low > self.upper_bound:
            return f"{shown.value - self.upper_bound:+.3f}"
        if shown.high < self.lower_bound:
            return f"{shown.value - self.lower_bound:+.3f}"
        return "inside"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalEntropyBits:
    """Minibatch entropy of the first label within each value of another, in bits.

    Parameters
    ----------
    given
        The obs column within whose values the label is to be mixed.
    expected
        Mean over the plan's minibatches, replayed over both labels in their order of storage,
        with its 95 % interval.
    random
        Exact expectation of true random sampling from these labels.
    """

    given: str
    expected: Estimate
    random: float

    @property
    def share_of_random(self) -> float:
        """Expected entropy as a share of true random sampling's."""
        return self.expected.value / self.random if self.random else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelResult:
    """One label in the minibatches of one configuration.

    Parameters
    ----------
    entropy_bits
        Its entropy.
    verdict
        What the measured entropy proves; None unless measured.
    """

    entropy_bits: EntropyBits
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationResult:
    """One cell of the grid.

    Parameters
    ----------
    configuration
        The settings.
    status
        Whether it was measured, and if not, why.
    note
        More about the status, or empty.
    cells_per_second
        Throughput with its 95 % interval; None if there are fewer than four rounds.
    n_rounds
        Rounds of whole fetches that the throughput rests on; with fewer than eight, the status
        is "not enough samples".
    entropy_bits
        Entropy of the first label in its minibatches.
    peak_memory_bytes
        Highest memory of the process and its workers; None if it never ran.
    bytes_read_per_cell
        What was read for each cell that came out; None if that is not known.
    worker_start_seconds, first_minibatch_seconds
        Start-up, which is no part of the throughput; None if it never ran.
    verdict
        What the measured entropy of the first label proves; None unless measured.
    further_labels
        The same of other labels, by name.
    conditional_entropy_bits
        Entropy of the first label within each value of another; None if that was not asked for.
    """

    configuration: Configuration
    status: Status
    entropy_bits: EntropyBits
    note: str = ""
    cells_per_second: Estimate | None = None
    n_rounds: int = 0
    peak_memory_bytes: int | None = None
    bytes_read_per_cell: BytesRead | None = None
    worker_start_seconds: float | None = None
    first_minibatch_seconds: float | None = None
    verdict: Verdict | None = None
    further_labels: Mapping[str, LabelResult] = field(default_factory=dict)
    conditional_entropy_bits: ConditionalEntropyBits | None = None

    @property
    def least_mixed_label(self) -> str | None:
        """Which of further labels is mixed least; None if the first label is."""
        shares = {
            name: each.entropy_bits.share_of_random for name, each in self.further_labels.items()
        }
        least = min(shares, key=shares.__getitem__, default=None)
        if least is None or shares[least] >= self.entropy_bits.share_of_random:
            return None
        return least

    @property
    def least_mixed(self) -> EntropyBits:
        """Entropy of the label that is mixed least, against random sampling.

        A configuration is as mixed as this label is.
        """
        least = self.least_mixed_label
        return self.entropy_bits if least is None else self.further_labels[least].entropy_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a configuration must meet to be recommended.

    Parameters
    ----------
    entropy_floor
        Least entropy, as a share of true random sampling's.
    memory_bytes
        Most memory of the process and its workers.
    need_cells_per_second
        Throughput that suffices; None for the most there is.
    step_seconds
        How long training computes on a minibatch, if that is where the need comes from: then it
        is missed rather than nothing recommended.
    """

    entropy_floor: float
    memory_bytes: int
    need_cells_per_second: float | None
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelCensus:
    """How an obs column is distributed over all cells.

    Parameters
    ----------
    n_labels, n_missing
        How many values it takes, and how many cells have none.
    label_entropy_bits
        Its entropy.
    """

    n_labels: int
    n_missing: int
    label_entropy_bits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The collection and its labels.

    Parameters
    ----------
    paths
        Its files.
    n_cells, n_vars, layout, dtype
        Its matrix.
    bytes_on_disk
        Size of the files.
    stored_bytes_per_cell
        Mean size of a cell in storage, compressed; of the matrix that is read, and no other.
    rows_per_chunk
        Mean number of rows in a unit of storage that is read as a whole.
    label, n_labels, n_missing
        The first label's obs column, how many values it takes, and how many cells have none.
    label_entropy_bits
        Entropy of the label over all cells.
    batch_size
        Cells of a minibatch.
    further_labels
        The other labels by the names of their obs columns.
    label_counts
        Cells of each value of the first label; empty if it takes very many.
    """

    paths: tuple[str, ...]
    n_cells: int
    n_vars: int
    layout: str
    dtype: str
    bytes_on_disk: int
    stored_bytes_per_cell: float
    rows_per_chunk: float
    label: str
    n_labels: int
    n_missing: int
    label_entropy_bits: float
    batch_size: int
    further_labels: Mapping[str, LabelCensus] = field(default_factory=dict)
    label_counts: tuple[int, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, the first one first."""
        return self.label, *self.further_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How much of its time training waits for minibatches.

    Parameters
    ----------
    share
        0 to 1, measured with a loop that computes for as long as a step takes; None if there was
        no time for that. Its interval is infinite for a single round.
    n_rounds
        Rounds of whole fetches that it rests on.
    expected_share
        What throughput alone lets one expect.
    """

    share: Estimate | None
    n_rounds: int
    expected_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """The choice.

    Parameters
    ----------
    configuration
        The settings.
    cells_per_second
        Throughput measured afresh after the choice; that of the search if time ran out.
    measured_afresh
        Which of the two it is.
    peak_memory_bytes
        Highest memory of the process and its workers.
    reason
        Why, in one sentence.
    waiting
        Whether training waits for it; None unless a training step was given.
    """

    configuration: Configuration
    cells_per_second: Estimate
    measured_afresh: bool
    peak_memory_bytes: int
    reason: str
    waiting: Waiting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The configuration that comes nearest where none is feasible.

    Parameters
    ----------
    configuration
        The settings.
    problem
        What it lacks, in one clause.
    """

    configuration: Configuration
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """A space of configurations too large to list, of which a study proposed some.

    Parameters
    ----------
    block_sizes, fetch_factors, workers
        The smallest and the largest of each.
    n_configurations
        How many there are.
    n_considered
        How many were proposed or known, and held against constraints and the cost model.
    """

    block_sizes: tuple[int, int]
    fetch_factors: tuple[int, int]
    workers: tuple[int, int]
    n_configurations: int
    n_considered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneResult:
    """All that ``autotune`` found.

    Parameters
    ----------
    machine, dataset, constraints
        What it was asked about.
    cache
        State of the page cache that throughputs were measured in; "unknown" if pages were to
        be dropped but stayed.
    configurations
        The grid; of ranges, what was measured.
    recommended
        The choice, or None.
    nearest
        Where there is no choice, what comes nearest; None if nothing was measured.
    seconds
        Time that it took.
    date
        When it began, with the offset from UTC.
    storage_order
        Whether the files are shuffled already; None if that was not looked at.
    earlier
        What became of earlier runs' results; None if they were not looked at.
    entropy_over_epoch
        For each label, entropy in each tenth of an epoch of the configuration that was chosen;
        empty if none was, or an epoch has too few minibatches.
    bottleneck
        Where the time of a cell goes in the chosen configuration; None if there was no time to
        find out.
    storage_advice
        What other layouts of the files may give, the best first; often nothing.
    ranges
        What configurations were proposed from; None if all were listed.
    """

    machine: Machine
    dataset: Dataset
    constraints: Constraints
    cache: CacheState | Literal["unknown"]
    configurations: tuple[ConfigurationResult, ...]
    recommended: Recommended | None
    nearest: Nearest | None
    seconds: float
    date: datetime
    storage_order: StorageOrder | None = None
    earlier: Earlier | None = None
    entropy_over_epoch: Mapping[str, EpochCourse] = field(default_factory=dict)
    bottleneck: Bottleneck | None = None
    storage_advice: tuple[StorageAdvice, ...] = ()
    ranges: Ranges | None = None

    @property
    def chosen(self) -> ConfigurationResult | None:
        """What is known of the configuration that is recommended; None if none is."""
        if self.recommended is None:
            return None
        configuration = self.recommended.configuration
        found = (each for each in self.configurations if each.configuration == configuration)
        return next(found, None)

    def __repr__(self) -> str:
        from cellfeed_tuner._reports._summary import text_summary  # noqa: PLC0415 - made of results

        return f"<AutotuneResult: {text_summary(self)}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the recommendation, its figures and its proof."""
        from cellfeed_tuner._reports._summary import html_summary  # noqa: PLC0415 - as above

        return html_summary(self)

    def read_amplification(self, result: ConfigurationResult) -> float | None:
        """Return how many times the stored size of a cell is read for each that is delivered.

        Read from storage, or, where the page cache was warm or unknown, asked of the system.
        None if that is not known.
        """
        read, stored = result.bytes_read_per_cell, self.dataset.stored_bytes_per_cell
        if read is None or stored <= 0:
            return None
        return (read.from_storage if self.cache == "cold" else read.asked) / stored

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, in the schema ``cellfeed.autotune/1``."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "date": self.date.isoformat(timespec="seconds"),
            "machine": self.machine.to_json(),
            "dataset": asdict(self.dataset),
            "constraints": asdict(self.constraints),
            "cache": self.cache,
            "seconds": self.seconds,
            "configurations": [
                configuration_json(result) | {"read_amplification": self.read_amplification(result)}
                for result in self.configurations
            ],
            "recommended": self.recommended and recommended_json(self.recommended),
            "nearest": self.nearest and flat(asdict(self.nearest)),
            "storage_order": self.storage_order and storage_order_json(self.storage_order),
            "earlier": self.earlier and asdict(self.earlier),
            "entropy_over_epoch": {
                label: course_json(course) for label, course in self.entropy_over_epoch.items()
            },
            "bottleneck": self.bottleneck and bottleneck_json(self.bottleneck),
            "storage_advice": [
                asdict(each) | {"sentence": each.sentence} for each in self.storage_advice
            ],
            "ranges": self.ranges and asdict(self.ranges),
        }

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> "AutotuneResult":
        """Read a result that `save` wrote.

        Raises
        ------
        PathError
            There is no such file.
        FormatError
            It is no result of ``autotune``, or of another schema.
        """
        if not path.is_file():
            msg = f"{path}: no such file; make it with `autotune PATH... --label COLUMN`"
            raise PathError(msg)
        try:
            plain = json.loads(path.read_text())
            schema = plain["schema"]
            if schema == SCHEMA:
                return record_from_json(cls, nested(plain))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"{path}: not a result of autotune (lacks or garbles {error}); run it again"
            raise FormatError(msg) from error
        msg = f"{path}: has schema {schema!r}, but {SCHEMA!r} is read; run autotune again"
        raise FormatError(msg)
