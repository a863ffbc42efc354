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
    "not enough samples",  # timed, but for too few whole fetches
    "too few cells",  # an epoch holds too few whole fetches to time any
    "over memory",  # its buffers alone exceed the memory given
    "too slow",  # not timed, since by its like it cannot be the best
    "below entropy floor",  # not timed, since it mixes too little to be chosen
    "out of budget",  # not timed for want of time
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
        "Too few whole fetches could be timed for a throughput",
    ),
    "too few cells": _StatusWords(
        "too few cells", "too few cells", "The collection has too few cells to time it"
    ),
    "over memory": _StatusWords(
        "over memory", "over memory", "It does not fit in the memory given"
    ),
    "too slow": _StatusWords(
        "too slow", "predicted slower than the best",
        "It was not timed, since it is predicted to be slower than the best",
    ),
    "below entropy floor": _StatusWords("below floor", "below the entropy floor"),
    "out of budget": _StatusWords(
        "no time", "not timed (budget exhausted)",
        "It was not timed (budget exhausted; see --budget)",
    ),
    "failed": _StatusWords("failed", "failed", "It failed"),
    "measured": _StatusWords("", "measured"),
}  # fmt: skip
"""What to say of each status."""

VerdictKind = Literal["inside", "outside", "assumptions", "loader"]
MEANINGS: dict[VerdictKind, str] = {
    "inside": "as planned, and inside the paper's bounds.",
    "outside": "as planned, but outside the bounds or off the exact expectation, though theory "
    "should apply.",
    "assumptions": "as planned, but this collection is not as theory assumes.",
    "loader": "not as planned: something is wrong with the loader.",
}
"""What a verdict says."""
Assumption = Literal[
    "labels mixed inside blocks", "few blocks", "partial last fetch", "short last block",
    "missing labels",
]  # fmt: skip
"""What can keep theory from applying, named by what is found instead of what is assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a measured entropy proves.

    Parameters
    ----------
    kind
        "inside", "outside" or "assumptions" if the loader delivered its plan, and that is inside
        the bounds, outside, or where theory does not apply; "loader" if it did not.
    sentence
        What is known, in one sentence.
    bits
        By how much: 0 if inside, and if the loader is wrong, which is told by its cells; from the
        nearer bound (or, inside the bounds, from the exact expectation) if outside; from the exact
        expectation for homogeneous blocks if assumptions fail.
    error_bits
        What chance may do to it.
    assumptions
        Which assumptions fail, the weightiest first.
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
        """Entropy of random samples that minibatches are held against."""
        return self.random

    @property
    def share_of_random(self) -> float:
        """Expected entropy as a share of true random sampling's."""
        return self.expected.value / self.random_alike if self.random_alike else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBits(_MinibatchEntropyBits):
    """Minibatch label entropy of one configuration, in bits.

    Parameters
    ----------
    measured
        Mean over the minibatches that came out, with its 95 % interval; None if none did.
    expected
        Mean over the plan's minibatches, replayed over the labels in their order of storage,
        with its 95 % interval.
    homogeneous
        Exact expectation if every block held one label; see `theory.expected_entropy_bits`. None
        where theory does not apply: to other strategies than blocks in random order.
    lower_bound, upper_bound
        The paper's bounds, which are first-order expansions; 0 where theory does not apply.
    random
        Exact expectation of true random sampling from these labels, as often as the strategy draws
        them. Of a strategy of sets: of minibatches of random sets, by replay.
    random_of_known
        Where labels are missing: that of random samples which have as many labelled cells as the
        plan's minibatches; None where none are missing.
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
        """The paper's bounds, moved to what is exact where their expansion excludes that."""
        exact = self.lower_bound if self.homogeneous is None else self.homogeneous
        return min(self.lower_bound, exact), max(self.upper_bound, exact, self.random)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalEntropyBits(_MinibatchEntropyBits):
    """Minibatch entropy of the first label within each value of another; see `EntropyBits`.

    Parameters
    ----------
    given
        The obs column within whose values the label is to be mixed.
    """

    given: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelResult:
    """One label in the minibatches of one configuration, and what its measured entropy proves."""

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
    verdict: Verdict | None = None
    further_labels: Mapping[str, LabelResult] = field(default_factory=dict)
    conditional_entropy_bits: ConditionalEntropyBits | None = None

    @property
    def has_few_rounds(self) -> bool:
        """Whether there is a throughput, but from too few rounds to rely on."""
        return self.cells_per_second is not None and self.status != "measured"

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
