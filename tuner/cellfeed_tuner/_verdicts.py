"""Whether a loader delivers its plan, and whether theory explains what that gives.

Theory (`theory.expected_entropy_bits`, and the paper's bounds) assumes that each block holds one
label, drawn independently of all others; that blocks and fetches are whole; and that all rows have
a label. No collection is quite like that, so each departure is given in bits, to be held against
what a measurement can tell apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import copysign, isfinite, log, log2, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._label_entropy import LabelEntropy
from cellfeed_tuner._entropy._minibatch_entropy import LabelCounts, within_block_bits
from cellfeed_tuner._entropy._plan_replay import FetchSpread
from cellfeed_tuner._interval import BEYOND_CHANCE, CONFIDENCE, Estimate
from cellfeed_tuner._results._configuration_result import Assumption, EntropyBits, Verdict

__all__ = ["Departure", "Judge", "convicted", "departures", "standard_error_of", "verdict"]

# Sums of many logarithms may differ by so much.
_ROUNDING = 1e-9


class Judge:
    """Holds what was measured against the plan and theory for one label.

    Parameters
    ----------
    codes
        Code of each row's label in the order of storage, -1 where missing, shape (n_rows,).
    counted
        How often each occurs.
    batch_size
        Rows of a minibatch.
    rows_in_blocks
        Gives rows of blocks of a size, block after block; in the order of storage if None.
    """

    def __init__(
        self,
        codes: NDArray[np.integer],
        counted: LabelCounts,
        batch_size: int,
        rows_in_blocks: Callable[[int], NDArray[np.int64]] | None = None,
    ) -> None:
        self._counted, self._batch_size = counted, batch_size

        @cache
        def within(block_size: int) -> float:
            in_order = codes if rows_in_blocks is None else codes[rows_in_blocks(block_size)]
            return within_block_bits(in_order, block_size)

        @cache  # which workers do not matter to
        def departures_of(block_size: int, fetch_factor: int) -> list[Departure]:
            return departures(
                counted,
                within(block_size),
                batch_size=batch_size,
                block_size=block_size,
                fetch_factor=fetch_factor,
            )

        self._departures = departures_of

    def verdict(
        self, configuration: Configuration, planned: LabelEntropy, bits: EntropyBits, n_rounds: int
    ) -> Verdict | None:
        """Return the verdict on what was measured in ``n_rounds`` rounds at least.

        None where nothing was, theory does not apply, or the plan has too few whole fetches.
        """
        if planned.whole_fetches is None or bits.measured is None:
            return None
        block_size, fetch_factor = configuration.block_size, configuration.fetch_factor
        fetch_size = self._batch_size * fetch_factor
        error = standard_error_of(
            bits.measured,
            n_rounds,
            planned.whole_fetches,
            fetches_per_round=configuration.fetches_per_round,
            fetches_per_epoch=self._counted.n_rows // fetch_size,
            fetches_per_block=-(-block_size // fetch_size),
        )
        return verdict(
            bits,
            planned_bits=planned.whole_fetches.mean,
            standard_error=error,
            departures=self._departures(block_size, fetch_factor),
        )


def convicted(fault: str) -> Verdict:
    """Return the verdict on a loader whose minibatches were not those of the plan.

    Rows are compared one by one, so that nothing is left to chance.
    """
    return Verdict(kind="loader", sentence=f"THE LOADER IS WRONG: {fault}; please report this.")


@dataclass(frozen=True, slots=True)
class Departure:
    """An assumption that does not hold, the bits that this may shift the mean by, and the fact."""

    assumption: Assumption
    bits: float
    fact: str


def departures(
    counted: LabelCounts,
    within_block_bits: float,
    *,
    batch_size: int,
    block_size: int,
    fetch_factor: int,
) -> list[Departure]:
    """Return in which assumptions a collection departs from theory, the weightiest first.

    Labels mixed inside blocks add at most the entropy within a block (chain rule: the entropy of
    labels is at most that of blocks and that of labels within them). The n blocks of a fetch,
    drawn without replacement from N, have (N - n) / (N - 1) of the plug-in bias of independent
    ones, (K - 1) / (2 n ln 2), and at most the entropy log2 n; a split block counts as two.
    Neither lifts the entropy above that of random sampling. A short last block moves the
    boundaries of all behind it, which is half of an epoch on average, as theory can count; at
    most, all that is measured lies behind. Missing labels leave smaller minibatches and fetches;
    they are smallest where whole blocks are missing, which is assumed. A partial last fetch mixes
    as one of its own size does, and lowers the mean of the epoch by its share of it.
    """
    n_rows, counts = counted.n_rows, counted.counts
    fetch_size = batch_size * fetch_factor

    def homogeneous(m: int = batch_size, f: int = fetch_factor, n: int | None = None) -> float:
        return theory.expected_entropy_bits(counts, m, block_size, f, n_rows=n)

    usual = homogeneous()
    room = max(0.0, counted.random_entropy_bits(batch_size) - usual)
    n_blocks = -(-n_rows // block_size)
    in_fetch = max(1.0, min(fetch_size / block_size, n_blocks))
    bias = (counts.size - 1) / (2 * in_fetch * log(2)) * (in_fetch - 1) / max(1, n_blocks - 1)
    most = log2(in_fetch + (fetch_size % block_size > 0))
    share_missing = counted.n_missing / n_rows
    known_rows = max(1, round(batch_size * (1 - share_missing)))
    short, partial = n_rows % block_size, n_rows % fetch_size
    in_partial = max(1, partial // batch_size)
    found = [
        Departure(
            "labels mixed inside blocks",
            min(within_block_bits, room),
            f"labels are mixed inside blocks ({within_block_bits:.2f} bits within one)",
        ),
        Departure(
            "few blocks",
            min(bias, room, most - usual),
            f"there are few blocks ({n_blocks:,} of {counts.size:,} labels, "
            f"{fetch_size / block_size:,.3g} to a fetch)",
        ),
        Departure(
            "partial last fetch",
            partial / n_rows * (usual - homogeneous(f=in_partial)) if partial else 0.0,
            f"the last fetch is partial ({partial / n_rows:.0%} of all cells)",
        ),
        Departure(
            "short last block",
            2 * abs(homogeneous(n=n_rows) - usual) if short else 0.0,
            f"the last block is short ({short:,} cells), so that fetches cut blocks",
        ),
        Departure(
            "missing labels",
            usual - homogeneous(m=known_rows) if counted.n_missing else 0.0,
            f"labels are missing in {share_missing:.1%} of all cells",
        ),
    ]
    return sorted((each for each in found if each.bits > 0), key=lambda each: -each.bits)


def standard_error_of(
    measured: Estimate,
    n_rounds: int,
    planned: FetchSpread,
    *,
    fetches_per_round: int = 1,
    fetches_per_epoch: int,
    fetches_per_block: int = 1,
) -> float:
    """Return the standard error of the mean of some rounds of whole fetches, the larger of two.

    That of the rounds themselves says nothing where all happened to be alike, as where most
    minibatches hold one label; that of as many planned fetches knows better. Those of one epoch
    share out its rows: what one has too many of, the others lack. If a fetch's entropy is a
    quadratic function of such surpluses, as near the collection's frequencies, those of N fetches
    correlate by 1 / (N - 1)^2, so that the variance of their mean is N / (N - 1) times that of
    independent ones. Consecutive fetches that one block fills count as one.
    """
    n = fetches_per_epoch
    shared = n / (n - 1) if n > 1 else 1.0
    independent = max(1.0, n_rounds * fetches_per_round / fetches_per_block)
    of_plan = planned.deviation * sqrt(shared / independent)
    half = measured.high - measured.value
    if n_rounds < 2 or not isfinite(half):  # noqa: PLR2004 - a spread needs two
        return of_plan
    return max(half / float(student_t.ppf((1 + CONFIDENCE) / 2, n_rounds - 1)), of_plan)


def verdict(
    bits: EntropyBits,
    *,
    planned_bits: float,
    standard_error: float,
    departures: Sequence[Departure],
) -> Verdict | None:
    """Hold against theory what a loader measured that delivered its plan.

    With it goes whether the collection is as theory assumes. A value whose error touches a bound
    is inside. All figures are the same plug-in estimate over minibatches of the same size, so
    that its bias is on both sides. Partial fetches are not measured: what they do to an epoch is
    known from the plan.

    Parameters
    ----------
    bits
        What was measured, what the plan gives for whole epochs, and what theory does.
    planned_bits
        Mean of whole fetches of the plan.
    standard_error
        Of what was measured.
    departures
        How far the collection is from what theory assumes, the weightiest first.
    """
    if bits.measured is None or bits.homogeneous is None:
        return None
    value, exact, epoch = bits.measured.value, bits.homogeneous, bits.expected.value
    error = BEYOND_CHANCE * standard_error + _ROUNDING
    off_exact = _beyond(value, exact, exact, error)
    off = off_exact or _beyond(epoch, exact, exact, error)
    if off and sum(each.bits for each in departures) + error >= abs(off):
        # One that is below the standard error could not be seen.
        failing = [each for each in departures if each.bits > standard_error] or departures[:1]
        explained = [sum(each.bits for each in failing[:n]) for n in range(1, len(failing))]
        enough = sum(bits + error < abs(off) for bits in explained) + 1
        facts = " and ".join(each.fact for each in failing[:enough])
        got = f"{value:.3f} were measured, as the plan gives"
        if not off_exact:
            got = f"a whole epoch of the plan has {epoch:.3f}"
        return Verdict(
            kind="assumptions",
            bits=off,
            error_bits=error,
            assumptions=tuple(each.assumption for each in failing),
            sentence=f"Theory does not apply, since {facts}: it expects {exact:.3f} bits, but "
            f"{got}.",
        )
    low, high = bits.bounds
    whose = "bounds, exact where the paper's are loose"
    if (low, high) == (bits.lower_bound, bits.upper_bound):
        whose = "the paper's bounds"
    bounds = f"{whose} ({low:.3f} to {high:.3f})"
    if not off_exact:
        said = f"as the plan gives ({planned_bits:.3f}), inside {bounds}"
        return Verdict(
            kind="inside", error_bits=error, sentence=f"Measured {value:.3f} bits, {said}."
        )
    # What is outside the bounds is off what is exact, which they do not exclude.
    off_bounds = _beyond(value, low, high, error)
    where = f"{off_bounds:+.3f} outside {bounds}" if off_bounds else f"inside {bounds}"
    return Verdict(
        kind="outside",
        bits=off_bounds or off_exact,
        error_bits=error,
        sentence=f"Measured {value:.3f} bits, as planned, {where}, but {off_exact:+.3f} off the "
        f"exact expectation ({exact:.3f}), though no assumption is known to fail.",
    )


def _beyond(value: float, low: float, high: float, error: float) -> float:
    """Return how far a value lies outside a range, 0 if its error touches that."""
    distance = max(low - value, value - high)
    return copysign(distance, value - low) if distance > error else 0.0
