"""What is known of one configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._machine._processes import BytesRead

__all__ = [
    "MEANINGS", "STATUS_WORDS", "Assumption", "ConditionalEntropyBits", "ConfigurationResult",
    "EntropyBits", "LabelResult", "Status", "Verdict", "VerdictKind",
]  # fmt: skip

Status = Literal[
    "measured",
    "not enough samples",  # timed, but over too few whole fetches
    "too few cells",  # an epoch has too few whole fetches to time any
    "over memory",  # its buffers alone exceed the memory limit
    "too slow",  # not timed: similar configurations show that it cannot be the best
    "mixes less",  # not timed: predicted fast enough, but mixed less than another that is
    "not raced",  # not timed: the sampler races only the largest
    "below entropy floor",  # not timed: it mixes too little to be chosen
    "out of budget",  # not timed: no time left
    "interrupted",  # not timed: the run was interrupted before
    "failed",
]


class _StatusWords(NamedTuple):
    """A status in a picture, in a list, and in a sentence."""

    short: str
    listed: str
    sentence: str = ""


STATUS_WORDS: dict[Status, _StatusWords] = {
    "not enough samples": _StatusWords(
        "few samples", "timed for too few fetches",
        "Too few whole fetches were timed to give a throughput",
    ),
    "too few cells": _StatusWords(
        "too few cells", "too large for the collection",
        "The collection has too few cells to time it",
    ),
    "over memory": _StatusWords(
        "over memory", "over the memory limit", "It exceeds the memory limit"
    ),
    "too slow": _StatusWords(
        "too slow", "predicted slower than the best",
        "It was not timed because it is predicted to be slower than the best",
    ),
    "mixes less": _StatusWords(
        "mixes less", "mixed less than others that are fast enough",
        "It was not timed because it mixes less than others that are fast enough",
    ),
    "not raced": _StatusWords(
        "not raced", "not raced (see --sampler)",
        "It was not timed because `--sampler race` races only the largest configurations",
    ),
    "below entropy floor": _StatusWords("below floor", "below the entropy floor"),
    "out of budget": _StatusWords(
        "no time", "not timed (budget exhausted)",
        "It was not timed (budget exhausted; see --budget)",
    ),
    "interrupted": _StatusWords(
        "interrupted", "not timed (interrupted)",
        "It was not timed because the run was interrupted",
    ),
    "failed": _StatusWords("failed", "failed", "It failed"),
    "measured": _StatusWords("", "measured"),
}  # fmt: skip
"""How each status is worded."""

VerdictKind = Literal["inside", "outside", "assumptions", "loader"]
MEANINGS: dict[VerdictKind, str] = {
    "inside": "as planned, and inside the paper's bounds.",
    "outside": "as planned, but outside the bounds or off the exact expectation, although the "
    "theory should apply.",
    "assumptions": "as planned, but this collection violates an assumption of the theory.",
    "loader": "not as planned: the loader delivered wrong data.",
}
"""What each kind of verdict means."""
Assumption = Literal[
    "labels mixed inside blocks", "few blocks", "partial last fetch", "short last block",
    "missing labels",
]  # fmt: skip
"""What can keep the theory from applying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a measured entropy shows about the loader and the theory.

    Parameters
    ----------
    kind
        "loader" if the loader did not deliver its plan. If it did: "inside" or "outside" the
        bounds, or "assumptions" if the theory does not apply.
    sentence
        The finding in one sentence.
    bits
        How far off the entropy is. For "outside": from the nearer bound, or inside the bounds
        from the exact expectation. For "assumptions": from the exact expectation for homogeneous
        blocks. Otherwise 0.
    error_bits
        Sampling error of that.
    assumptions
        Assumptions that fail, the largest effect first.
    """

    kind: VerdictKind
    sentence: str
    bits: float = 0.0
    error_bits: float = 0.0
    assumptions: tuple[Assumption, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _MinibatchEntropyBits:
    """What is known of any entropy of minibatches."""

    expected: Estimate
    random: float
    measured: Estimate | None = None

    @property
    def random_alike(self) -> float:
        """Entropy of the random samples that minibatches are compared with."""
        return self.random

    @property
    def share_of_random(self) -> float:
        """Expected entropy as a share of that of random sampling."""
        return self.expected.value / self.random_alike if self.random_alike else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBits(_MinibatchEntropyBits):
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
        Exact expectation of true random sampling from these labels, weighted as the strategy
        draws them. For a strategy that draws sets: of minibatches of random sets, by replay.
    random_of_known
        Where labels are missing: expectation of random samples with as many labelled cells as the
        plan's minibatches. None where no labels are missing.
    """

    homogeneous: float | None = None
    lower_bound: float = 0.0
    upper_bound: float = 0.0
    random_of_known: float | None = None

    @property
    def random_alike(self) -> float:
        """Entropy of random samples with as many labelled cells as the minibatches."""
        return self.random if self.random_of_known is None else self.random_of_known

    @property
    def bounds(self) -> tuple[float, float]:
        """The paper's bounds, widened to the exact values that their expansions exclude."""
        exact = self.lower_bound if self.homogeneous is None else self.homogeneous
        return min(self.lower_bound, exact), max(self.upper_bound, exact, self.random)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalEntropyBits(_MinibatchEntropyBits):
    """Minibatch entropy of the first label within each value of another; see `EntropyBits`.

    Parameters
    ----------
    given
        The obs column within whose values the label should be mixed.
    """

    given: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelResult:
    """Entropy of one label in the minibatches of one configuration, with its verdict."""

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
        Whether it was measured, and if not, why.
    note
        Details of the status; may be empty.
    cells_per_second
        Throughput with its 95 % interval; None with fewer than four rounds.
    relative
        Its throughput divided by that of the recommended configuration, measured or predicted, with
        the 95 % interval; None without a recommendation, or if it is unknown.
    n_rounds
        Rounds of whole fetches that were timed; with fewer than eight, the status is
        "not enough samples".
    entropy_bits
        Entropy of the first label in its minibatches.
    peak_memory_bytes
        Peak memory of the process and its workers; None if it never ran.
    bytes_read_per_cell
        Bytes read for each delivered cell; None if unknown.
    verdict
        What the measured entropy of the first label shows; None unless measured.
    further_labels
        The same for other labels, by name.
    conditional_entropy_bits
        Entropy of the first label within each value of another; None unless requested.
    """

    configuration: Configuration
    status: Status
    entropy_bits: EntropyBits
    note: str = ""
    cells_per_second: Estimate | None = None
    relative: Estimate | None = None
    n_rounds: int = 0
    peak_memory_bytes: int | None = None
    bytes_read_per_cell: BytesRead | None = None
    verdict: Verdict | None = None
    further_labels: Mapping[str, LabelResult] = field(default_factory=dict)
    conditional_entropy_bits: ConditionalEntropyBits | None = None

    @property
    def has_few_rounds(self) -> bool:
        """Whether there is a throughput, but from too few rounds to rely on."""
        return self.cells_per_second is not None and self.status != "measured"

    @property
    def least_mixed_label(self) -> str | None:
        """The further label that is mixed least; None if the first label is."""
        shares: dict[str | None, float] = {None: self.entropy_bits.share_of_random}
        for name, each in self.further_labels.items():
            shares[name] = each.entropy_bits.share_of_random
        return min(shares, key=shares.__getitem__)

    @property
    def least_mixed(self) -> EntropyBits:
        """Entropy of the label that is mixed least, relative to random sampling."""
        least = self.least_mixed_label
        return self.entropy_bits if least is None else self.further_labels[least].entropy_bits
