"""What ``autotune`` found, as records and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._machine import BytesRead

if TYPE_CHECKING:
    from cellfeed import SamplingStrategy

# What is known of one configuration.

Status = Literal[
    "compared", "timed", "too long", "too few cells", "over memory", "too slow", "mixes less",
    "below entropy floor", "out of budget", "failed",
]  # fmt: skip
STATUS_MEANINGS: dict[Status, str] = {
    "compared": "timed in turns with the recommended one",
    "timed": "timed by itself",
    "too long": "took too long",
    "too few cells": "not timed: too few cells in the collection",
    "over memory": "not timed: over the memory limit",
    "too slow": "not timed: predicted slower than the best",
    "mixes less": "not timed: it mixes less than others that are fast enough",
    "below entropy floor": "not timed: it mixes too little",
    "out of budget": "not timed: the run ended before; see --budget",
    "failed": "failed",
}
"""What each status means, in a clause."""

VerdictKind = Literal["inside", "outside", "loader"]
MEANINGS: dict[VerdictKind, str] = {
    "inside": "as planned, and inside the paper's bounds.",
    "outside": "as planned, but outside the paper's bounds, since this collection's blocks are not "
    "of one label each, drawn independently.",
    "loader": "not as planned: the loader delivered wrong data.",
}
"""What each kind of verdict means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a measured entropy shows about the loader and the theory.

    Parameters
    ----------
    kind
        "loader" if the loader did not deliver its plan. If it did: "inside" or "outside" the
        paper's bounds, which are of blocks of one label each, drawn independently.
    sentence
        The finding in one sentence.
    bits
        How far the entropy lies outside the bounds, below them if negative; 0 inside.
    error_bits
        Sampling error of that.
    """

    kind: VerdictKind
    sentence: str
    bits: float = 0.0
    error_bits: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBits:
    """Minibatch label entropy of one configuration, in bits.

    Parameters
    ----------
    measured
        Mean over the delivered minibatches, with its 95 % interval; None if there were none.
    expected
        Mean over the minibatches of the plan, replayed over the labels in storage order, with its
        95 % interval.
    homogeneous
        Exact expectation if every block held a single label; see `theory.expected_entropy_bits`.
        None where the theory does not apply: to strategies other than randomly ordered blocks.
    lower_bound, upper_bound
        The paper's bounds, which are first-order expansions; 0 where the theory does not apply.
    random
        Exact expectation of true random sampling from these labels, 0 if it is unknown, as of a
        DataLoader; weighted as the strategy
        draws them. For a strategy that draws sets: of minibatches of random sets, by replay.
    random_of_known
        Where labels are missing: expectation of random samples with as many labelled cells as the
        plan's minibatches. None where no labels are missing.
    """

    expected: Estimate
    random: float
    measured: Estimate | None = None
    homogeneous: float | None = None
    lower_bound: float = 0.0
    upper_bound: float = 0.0
    random_of_known: float | None = None

    @property
    def random_alike(self) -> float:
        """Entropy of random samples with as many labelled cells as the minibatches."""
        return self.random if self.random_of_known is None else self.random_of_known

    @property
    def share_of_random(self) -> float:
        """Expected entropy as a share of that of random sampling."""
        return self.expected.value / self.random_alike if self.random_alike else 1.0

    @property
    def bounds(self) -> tuple[float, float]:
        """The paper's bounds, widened to the exact values that their expansions exclude."""
        exact = self.lower_bound if self.homogeneous is None else self.homogeneous
        return min(self.lower_bound, exact), max(self.upper_bound, exact, self.random)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelResult:
    """Entropy of one label in the minibatches of one configuration.

    ``verdict`` says what the measured entropy shows; None unless measured.
    """

    entropy_bits: EntropyBits
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationResult:
    """One configuration of the grid.

    Parameters
    ----------
    configuration
        The settings.
    status
        Whether it was timed, or compared (timed in turns with the recommended one), and if not,
        why.
    note
        Details of the status; may be empty.
    labels
        Entropy of each label in its minibatches, by obs column.
    cells_per_second
        Throughput with its 95 % interval; None if it was not timed.
    relative
        Its throughput divided by that of the recommended configuration, timed or predicted, with
        the 95 % interval; None without a recommendation, or if it is unknown.
    n_rounds
        Rounds of whole fetches that were timed.
    peak_memory_bytes
        Peak memory of the process and its workers; None if it never ran.
    bytes_read_per_cell
        Bytes read for each delivered cell; None if unknown.
    """

    configuration: Configuration
    status: Status
    labels: Mapping[str, LabelResult]
    note: str = ""
    cells_per_second: Estimate | None = None
    relative: Estimate | None = None
    n_rounds: int = 0
    peak_memory_bytes: int | None = None
    bytes_read_per_cell: BytesRead | None = None

    @property
    def least_mixed(self) -> str:
        """The label that is mixed least, relative to random sampling; empty without labels."""
        return min(
            self.labels, key=lambda name: self.labels[name].entropy_bits.share_of_random, default=""
        )

    @property
    def share_of_random(self) -> float:
        """Entropy of that label as a share of random sampling's; 1 without labels."""
        return min((e.entropy_bits.share_of_random for e in self.labels.values()), default=1.0)

    @property
    def is_expected_to_mix(self) -> bool:
        """Whether any label has an entropy to reach."""
        return any(each.entropy_bits.random_alike for each in self.labels.values())

    @property
    def is_entropy_measured(self) -> bool:
        """Whether minibatches with labels were delivered."""
        return all(each.entropy_bits.measured is not None for each in self.labels.values())

    @property
    def verdicts(self) -> list[Verdict]:
        """What measured entropies show, of one label after the other."""
        return [each.verdict for each in self.labels.values() if each.verdict]


# What was read: the collection, the distribution of its labels, and the strategy.

# The block size is searched, and a result has its row selection elsewhere.
_APART = ("block_size", "indices", "pools")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelCensus:
    """Distribution of an obs column over all cells.

    Parameters
    ----------
    n_labels, n_missing
        Number of distinct values, and of cells without a value.
    label_entropy_bits
        Entropy of the distribution.
    """

    n_labels: int
    n_missing: int
    label_entropy_bits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The cells that were visited, if not all were.

    ``where`` is the query that selects them (`cellfeed.Collection.where`); empty if they were given
    by row number.
    """

    n_cells: int
    where: str = ""

    @property
    def in_words(self) -> str:
        """Their number and query."""
        return f"{self.n_cells:,} cells" + (f" where {self.where}" if self.where else "")


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
        Size of the files, on this machine or on servers.
    stored_bytes_per_cell
        Mean compressed size of a cell in storage, in the matrix that is read.
    rows_per_chunk
        Mean number of rows in a chunk.
    labels
        The labels, by obs column. Of a DataLoader, what was delivered of the label that was asked
        for, or nothing.
    batch_size
        Cells of a minibatch.
    slow_reading
        What is read slowly, why, and the remedy, in one line; empty if nothing is. See
        `cellfeed.Collection.slow_reading`.
    selection
        The cells that were visited, which the labels refer to; None if all were.
    has_storage_options
        Whether servers were reached with ``storage_options``, which are not saved.
    loader
        The loader that read it, if not cellfeed; its number of genes and storage are unknown, and
        given as 0 or empty.
    elements
        What was read, such as "X" or "layers/counts"; empty if unknown.
    dense
        Whether minibatches were made dense.
    unit
        What throughput counts: "cells"; of a DataLoader, "rows" or, if its minibatches have unknown
        sizes, "minibatches".
    """

    paths: tuple[str, ...]
    n_cells: int
    n_vars: int = 0
    layout: str = ""
    dtype: str = ""
    bytes_on_disk: int = 0
    stored_bytes_per_cell: float = 0.0
    rows_per_chunk: float = 1.0
    labels: Mapping[str, LabelCensus]
    batch_size: int
    slow_reading: str = ""
    selection: Selection | None = None
    has_storage_options: bool = False
    loader: str = ""
    elements: tuple[str, ...] = ()
    dense: bool = False
    unit: str = "cells"

    @property
    def n_visited(self) -> int:
        """Number of cells that were visited."""
        return self.n_cells if self.selection is None else self.selection.n_cells


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedStrategy:
    """A strategy without its block size, which was searched, and without its rows.

    Parameters that are arrays, such as weights, are saved by name only.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    has_block_size: bool = True

    @classmethod
    def of(cls, strategy: "SamplingStrategy") -> "SearchedStrategy":
        """Return the record of a strategy."""
        known = getattr(strategy, "__dataclass_fields__", {})
        parameters, arrays = dict[str, Any](), list[str]()
        for each in known.values():
            value = getattr(strategy, each.name) if each.init else each.default
            if value is each.default or each.name in _APART:
                continue
            if isinstance(value, tuple) and all(isinstance(name, str) for name in value):
                parameters[each.name] = list(value)
            elif isinstance(value, bool | int | float | str):
                parameters[each.name] = value
            else:
                arrays.append(each.name)
        return cls(
            name=type(strategy).__name__,
            parameters=parameters,
            arrays=tuple(arrays),
            has_block_size="block_size" in known and known["block_size"].init,
        )

    def in_python(self, block_size: int | None = None, rows: str = "") -> str:
        """Return the Python expression that makes it.

        Examples
        --------
        >>> strategy = SearchedStrategy(name="GroupedSampling", parameters={"set_size": 16})
        >>> strategy.in_python(4, "train")
        'GroupedSampling(set_size=16, block_size=4, indices=train)'
        """
        arguments = [
            f"{name}={tuple(value) if isinstance(value, list) else value!r}"
            for name, value in self.parameters.items()
        ]
        arguments += [f"{name}={name}" for name in self.arrays]
        if block_size is not None and self.has_block_size:
            arguments.append(f"block_size={block_size}")
        import cellfeed  # noqa: PLC0415 - showing results seldom needs it

        # The rows of one that chooses among those of another strategy are that one's.
        known = getattr(getattr(cellfeed, self.name, None), "__dataclass_fields__", {"indices"})
        if rows and "indices" in known:
            arguments.append(f"indices={rows}")
        return f"{self.name}({', '.join(arguments)})"

    @property
    def is_made_again(self) -> bool:
        """Whether `cellfeed.CellDataset.from_autotune` can make it without help."""
        import cellfeed  # noqa: PLC0415 - showing results seldom needs it

        return not self.arrays and self.name in cellfeed.__all__

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it takes labels from."""
        labels = self.parameters.get("labels", ())
        return (labels,) if isinstance(labels, str) else tuple(labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOrder:
    """The entropy that large blocks cost in the worst case, with one minibatch to a fetch.

    Parameters
    ----------
    block_size
        Rows of a block.
    expected_bits
        Mean entropy of minibatches at that block size and fetch factor 1, replayed over the
        labels in their order of storage.
    random_bits
        Exact expectation of random sampling.
    tolerance_bits
        How far below it rows in random order may fall by chance.
    """

    block_size: int
    expected_bits: float
    random_bits: float
    tolerance_bits: float

    @property
    def already_shuffled(self) -> bool:
        """Whether large blocks cost no more entropy than chance may."""
        return self.expected_bits >= self.random_bits - self.tolerance_bits

    @property
    def sentence(self) -> str:
        """The conclusion in one sentence."""
        bits = (
            f"blocks of {self.block_size:,} give {self.expected_bits:.3f} bits with one "
            f"minibatch to a fetch, where random sampling gives {self.random_bits:.3f}"
        )
        if self.already_shuffled:
            return (
                "The files are already shuffled, so large blocks cost nothing: "
                f"{bits} (chance alone may take {self.tolerance_bits:.3f})."
            )
        return f"The files are not shuffled: {bits}."


# The constraints of a search, and what it recommends.


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """Throughput of the recommended configuration at one prefetch depth.

    Parameters
    ----------
    prefetch
        Fetches read ahead; see `cellfeed.CellDataset`.
    cells_per_second
        Throughput with its 95 % interval; None if there were too few rounds.
    n_rounds, n_turns
        Rounds of whole fetches that were timed, and over how many measurements, which were
        interleaved with those of other depths.
    peak_memory_bytes
        Peak memory of the process and its workers.
    """

    prefetch: int
    cells_per_second: Estimate | None
    n_rounds: int
    n_turns: int
    peak_memory_bytes: int


SAME_ENTROPY_SHARE = 0.001
"""Shares of random sampling's entropy that differ by less than this count as equal: a replay of
the plan is no more exact."""


Basis = Literal["compared", "timed", "predicted"]
"""What a recommendation rests on: the configuration was timed in turns with others, was timed by
itself, or was only predicted."""


MUCH_CHANCE = 1 / 3
"""Probability that another is clearly faster from which on a choice is undecided."""


def least_share(entropy_floor: float) -> float:
    """Return the lowest share of random sampling's entropy that counts as reaching the floor."""
    return entropy_floor - SAME_ENTROPY_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a configuration must meet to be recommended.

    Parameters
    ----------
    entropy_floor
        Minimum entropy, as a share of that of true random sampling; missing it by less than
        0.001 counts as reaching it.
    memory_bytes
        Memory limit of the process and its workers.
    need_cells_per_second
        Throughput that suffices; None to maximise it.
    step_seconds
        Time of a training step, if the need comes from one. If no configuration keeps up, the
        fastest is recommended nonetheless.
    """

    entropy_floor: float
    memory_bytes: int
    need_cells_per_second: float | None
    step_seconds: float | None = None

    def mixes(self, share_of_random: float) -> bool:
        """Return whether a share of random sampling's entropy reaches the floor."""
        return share_of_random >= least_share(self.entropy_floor)

    def allow(self, result: ConfigurationResult) -> bool:
        """Return whether a configuration mixes well enough and fits in memory, if that is known."""
        fits = (result.peak_memory_bytes or 0) <= self.memory_bytes
        return fits and self.mixes(result.share_of_random)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Share of its time that training waits for minibatches.

    Parameters
    ----------
    share
        0 to 1, measured with a loop that computes for as long as a training step takes; None if
        there was no time to measure it. The interval of a single round is infinite.
    n_rounds
        Rounds of whole fetches that were timed.
    expected_share
        The share estimated from throughput alone.
    """

    share: Estimate | None
    n_rounds: int
    expected_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A configuration whose measurements were interleaved with those of the recommended one.

    Parameters
    ----------
    configuration
        Its settings.
    ratio
        Throughput of the recommended configuration divided by its own, with the 95 % interval.
    n_turns
        How often both were measured, one right after the other.
    """

    configuration: Configuration
    ratio: Estimate
    n_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """The recommended configuration.

    Parameters
    ----------
    configuration
        The settings.
    basis
        What the choice rests on. "compared": timed in turns with its rivals. "timed": by itself,
        because time ran out, nothing else is feasible, or a throughput is needed. "predicted": the
        likeliest to be the fastest that there was no time to time.
    cells_per_second
        Throughput with its 95 % interval, by this clock and under the load of other programs; from
        measurements interleaved with those of its rivals if it was compared, or predicted. None if
        too little was measured.
    peak_memory_bytes
        Peak memory of the process and its workers; None if it was not measured.
    reason
        Why it is recommended, in one sentence.
    waiting
        How long training waits for it; None unless a training step was given.
    rivals
        Configurations that it was compared with, the fastest first.
    chance_of_faster
        Probability that any configuration that was not measured, but mixes well enough, is more
        than 5 % faster. None if that was not asked: a throughput is needed, or entropies are known
        only by measuring.
    start_seconds
        Seconds that its throughput leaves out: at the start of each epoch with worker processes;
        otherwise once in a process, whose memory is new then.
    longest_seconds
        How long it was measured without a break, at most.
    prefetch
        For files on servers, how many fetches to read ahead; None if that was not measured. The
        throughput is at the default depth of `cellfeed.CellDataset`; for other depths see
        `AutotuneResult.prefetch_results`.
    """

    configuration: Configuration
    basis: Basis
    cells_per_second: Estimate | None
    peak_memory_bytes: int | None
    reason: str
    waiting: Waiting | None = None
    rivals: tuple[Rival, ...] = ()
    chance_of_faster: float | None = None
    prefetch: int | None = None
    start_seconds: float = 0.0
    longest_seconds: float = 0.0

    @property
    def compared(self) -> tuple[Configuration, ...]:
        """The configurations that were timed in turns, with this one; empty if it was not."""
        if self.basis != "compared":
            return ()
        return self.configuration, *(each.configuration for each in self.rivals)

    @property
    def may_be_surpassed(self) -> bool:
        """Whether one that was not measured may well be more than 5 % faster."""
        return (self.chance_of_faster or 0.0) >= MUCH_CHANCE

    @property
    def settings(self) -> str:
        """All settings in words."""
        ahead = "" if self.prefetch is None else f", prefetch {self.prefetch}"
        return f"{self.configuration}{ahead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The configuration closest to being feasible, where none is.

    Parameters
    ----------
    configuration
        The settings.
    problem
        Which constraints it violates, in one clause.
    """

    configuration: Configuration
    problem: str
