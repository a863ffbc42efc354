"""Whether a loader delivers its plan, and whether theory explains what that gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import copysign, isfinite, sqrt
from typing import Literal

from scipy.stats import t as student_t

from cellfeed_tuner._entropy._plan_replay import FetchSpread
from cellfeed_tuner._interval import BEYOND_CHANCE, CONFIDENCE, Estimate
from cellfeed_tuner._verdicts._assumptions import Assumption, Departure

__all__ = ["MEANINGS", "Measured", "Theory", "Verdict", "VerdictKind", "convicted", "verdict"]

VerdictKind = Literal["inside", "outside", "assumptions", "loader"]
MEANINGS: dict[VerdictKind, str] = {
    "inside": "as planned, and inside the paper's bounds.",
    "outside": "as planned, but outside the bounds or off the exact expectation, though theory "
    "should apply.",
    "assumptions": "as planned, but this collection is not as theory assumes.",
    "loader": "not as planned: something is wrong with the loader.",
}
"""What a verdict says."""

# Sums of many logarithms may differ by so much.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An entropy that was measured over rounds of whole fetches.

    Parameters
    ----------
    bits
        Mean with its 95 % interval.
    n_rounds
        Rounds that it rests on; fewer than there were is on the safe side.
    fetches_per_round
        Whole fetches of a round.
    fetches_per_epoch
        Whole fetches of an epoch.
    fetches_per_block
        Consecutive fetches that one block fills; 1 unless blocks are larger than fetches.
    """

    bits: Estimate
    n_rounds: int
    fetches_per_round: int
    fetches_per_epoch: int
    fetches_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """What theory gives for the same configuration, in bits.

    Parameters
    ----------
    homogeneous
        Exact expectation for homogeneous blocks.
    lower_bound, upper_bound
        The paper's bounds, which are first-order expansions.
    random
        Exact expectation of true random sampling.
    departures
        How far the collection is from what theory assumes.
    """

    homogeneous: float
    lower_bound: float
    upper_bound: float
    random: float
    departures: Sequence[Departure]

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds, moved where their expansion excludes what is exact."""
        return (
            min(self.lower_bound, self.homogeneous),
            max(self.upper_bound, self.homogeneous, self.random),
        )

    @property
    def bounds_in_words(self) -> str:
        """The bounds, and whose they are."""
        low, high = self.bounds
        are_the_papers = (low, high) == (self.lower_bound, self.upper_bound)
        whose = (
            "the paper's bounds" if are_the_papers else "bounds, exact where the paper's are loose"
        )
        return f"{whose} ({low:.3f} to {high:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a measured entropy proves.

    Parameters
    ----------
    kind
        "inside", "outside" or "assumptions" if the loader delivered its plan, and that is inside
        the bounds, outside, or where theory does not apply; "loader" if it did not.
    bits
        By how much: 0 if inside, and if the loader is wrong, which is told by its cells; from the
        nearer bound (or, inside the bounds, from the exact expectation) if outside; from the exact
        expectation for homogeneous blocks if assumptions fail.
    error_bits
        What chance may do to it.
    assumptions
        Which assumptions fail, the weightiest first.
    sentence
        All this in one sentence.
    """

    kind: VerdictKind
    bits: float
    error_bits: float
    assumptions: tuple[Assumption, ...]
    sentence: str


def convicted(fault: str) -> Verdict:
    """Return the verdict on a loader whose minibatches were not those of the plan.

    Rows are compared one by one, so that nothing is left to chance.

    Parameters
    ----------
    fault
        The first minibatch that was not as planned, in words.
    """
    return Verdict(
        kind="loader",
        bits=0.0,
        error_bits=0.0,
        assumptions=(),
        sentence=f"THE LOADER IS WRONG: {fault}; please report this.",
    )


def verdict(
    measured: Measured, *, planned: FetchSpread, epoch_bits: float, theory: Theory
) -> Verdict:
    """Hold against theory what a loader measured that delivered its plan.

    With it goes whether the collection is as theory assumes. A value whose error touches a bound
    is inside. All figures are the same plug-in estimate over minibatches of the same size, so
    that its bias is on both sides.

    Parameters
    ----------
    measured
        What was measured.
    planned
        Mean and spread of whole fetches, replayed over the labels.
    epoch_bits
        Mean over whole epochs of the plan, partial last fetches included, which are not measured.
    theory
        What theory gives.
    """
    value = measured.bits.value
    error = BEYOND_CHANCE * _standard_error(measured, planned) + _ROUNDING
    # Partial fetches are not measured: what they do to an epoch is known from the plan.
    off_exact = _beyond(value, theory.homogeneous, theory.homogeneous, error)
    off_epoch = _beyond(epoch_bits, theory.homogeneous, theory.homogeneous, error)
    off_bounds = _beyond(value, *theory.bounds, error)
    off = off_exact or off_epoch
    if off and sum(each.bits for each in theory.departures) + error >= abs(off):
        return _not_applicable(value, epoch_bits, off_exact, error, theory)
    if off_exact:  # what is outside the bounds is off what is exact, which they do not exclude
        return _outside(value, off_bounds, off_exact, error, theory)
    return Verdict(
        kind="inside",
        bits=0.0,
        error_bits=error,
        assumptions=(),
        sentence=(
            f"Measured {value:.3f} bits, as the plan gives ({planned.mean:.3f}), inside "
            f"{theory.bounds_in_words}."
        ),
    )


def _standard_error(measured: Measured, planned: FetchSpread) -> float:
    """Return the standard error of the measured mean, the larger of two.

    That of the rounds themselves says nothing where all happened to be alike, as where most
    minibatches hold one label; that of as many planned fetches knows better.
    """
    n_fetches = measured.n_rounds * measured.fetches_per_round
    half = measured.bits.high - measured.bits.value
    if measured.n_rounds < 2 or not isfinite(half):  # noqa: PLR2004 - a spread needs two
        return _planned_error(measured, planned, n_fetches)
    quantile = float(student_t.ppf((1 + CONFIDENCE) / 2, measured.n_rounds - 1))
    return max(half / quantile, _planned_error(measured, planned, n_fetches))


def _planned_error(measured: Measured, planned: FetchSpread, n_fetches: int) -> float:
    """Return the standard error of the mean over so many planned fetches.

    Fetches of one epoch share out its rows: what one has too many of, the others lack. If a
    fetch's entropy is a quadratic function of such surpluses, as near the collection's
    frequencies, those of N fetches correlate by 1 / (N - 1)^2, so that the variance of their
    mean is N / (N - 1) times that of independent ones. Fetches from one block count as one.
    """
    n = measured.fetches_per_epoch
    shared = n / (n - 1) if n > 1 else 1.0
    independent = max(1.0, n_fetches / measured.fetches_per_block)
    return planned.deviation * sqrt(shared / independent)


def _beyond(value: float, low: float, high: float, error: float) -> float:
    """Return how far a value lies outside a range, 0 if its error touches that."""
    distance = max(low - value, value - high)
    return copysign(distance, value - low) if distance > error else 0.0


def _not_applicable(
    value: float, epoch_bits: float, off_exact: float, error: float, theory: Theory
) -> Verdict:
    off = off_exact or epoch_bits - theory.homogeneous
    by_weight = sorted(theory.departures, key=lambda each: -each.bits)
    # One that is below the standard error could not be seen.
    failing = [each for each in by_weight if each.bits > error / BEYOND_CHANCE] or by_weight[:1]
    explained = [sum(each.bits for each in failing[:n]) for n in range(1, len(failing))]
    enough = sum(bits + error < abs(off) for bits in explained) + 1
    facts = " and ".join(each.fact for each in failing[:enough])
    got = (
        f"measured are {value:.3f}, as the plan gives"
        if off_exact
        else f"a whole epoch gives {epoch_bits:.3f} by the plan"
    )
    return Verdict(
        kind="assumptions",
        bits=off,
        error_bits=error,
        assumptions=tuple(each.assumption for each in failing),
        sentence=(
            f"Theory does not apply, since {facts}: "
            f"it has {theory.homogeneous:.3f} bits, and {got}."
        ),
    )


def _outside(
    value: float, off_bounds: float, off_exact: float, error: float, theory: Theory
) -> Verdict:
    bounds = theory.bounds_in_words
    where = f"{off_bounds:+.3f} outside {bounds}" if off_bounds else f"inside {bounds}"
    why = (
        f"but {off_exact:+.3f} off the exact expectation ({theory.homogeneous:.3f}), though no "
        "assumption is known to fail"
    )
    return Verdict(
        kind="outside",
        bits=off_bounds or off_exact,
        error_bits=error,
        assumptions=(),
        sentence=f"Measured {value:.3f} bits, as planned, {where}, {why}.",
    )
