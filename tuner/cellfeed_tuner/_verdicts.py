"""Whether a loader delivers its plan, and whether the theory explains the resulting entropy.

The theory (`theory.expected_entropy_bits` and the paper's bounds) assumes that each block holds one
label, drawn independently of all others; that blocks and fetches are whole; and that all rows have
a label. No collection meets all of this, so each deviation is expressed in bits and compared with
the sampling error of the measurement.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import copysign, isfinite, log, log2, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._label_entropy import LabelEntropy
from cellfeed_tuner._entropy._minibatch_entropy import LabelCounts, within_block_bits
from cellfeed_tuner._entropy._plan_replay import FetchSpread
from cellfeed_tuner._interval import BEYOND_CHANCE, CONFIDENCE, Estimate
from cellfeed_tuner._results._configuration_result import Assumption, EntropyBits, Verdict

__all__ = ["Deviation", "Judge", "deviations", "standard_error_of", "verdict", "wrong_data"]

# Rounding error of sums of many logarithms.
_ROUNDING = 1e-9


class Judge:
    """Compares the measured entropy of one label with the plan and the theory.

    Parameters
    ----------
    codes
        Label code of each row in storage order, -1 where missing, shape (n_rows,).
    counted
        Counts of the labels.
    batch_size
        Rows of a minibatch.
    rows_in_blocks
        Returns the rows of all blocks of a given size; in storage order if None.
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

        @cache
        def deviations_of(block_size: int, fetch_factor: int) -> list[Deviation]:
            return deviations(
                counted,
                within(block_size),
                batch_size=batch_size,
                block_size=block_size,
                fetch_factor=fetch_factor,
            )

        self._deviations = deviations_of

    def verdict(
        self, configuration: Configuration, planned: LabelEntropy, bits: EntropyBits, n_rounds: int
    ) -> Verdict | None:
        """Return the verdict on an entropy measured over at least ``n_rounds`` rounds.

        None if nothing was measured, if there is no theory for the strategy, or if the plan has
        too few whole fetches.
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
            standard_error=error,
            deviations=self._deviations(block_size, fetch_factor),
        )


def wrong_data(fault: str) -> Verdict:
    """Return the verdict on a loader whose minibatches differ from the plan, row by row."""
    sentence = f"The loader delivered wrong data: {fault}; please report this."
    return Verdict(kind="loader", sentence=sentence)


@dataclass(frozen=True, slots=True)
class Deviation:
    """An assumption that fails, by how many bits this may shift the mean, and the reason."""

    assumption: Assumption
    bits: float
    fact: str


def deviations(
    counted: LabelCounts,
    within_block_bits: float,
    *,
    batch_size: int,
    block_size: int,
    fetch_factor: int,
) -> list[Deviation]:
    """Return which assumptions of the theory a collection violates, the largest effect first.

    - Labels mixed inside blocks add at most the entropy within a block (chain rule).
    - The n blocks of a fetch, drawn without replacement from N, have (N - n) / (N - 1) times the
      plug-in bias of independent ones, (K - 1) / (2 n ln 2), and an entropy of at most log2 n; a
      split block counts as two. Like the first, this cannot exceed random sampling.
    - A short last block moves the boundaries of all blocks behind it: half of an epoch on average,
      at most everything that is measured.
    - A partial last fetch mixes like any fetch of its size, weighted by its share of the epoch.
    - Missing labels make minibatches and fetches smaller, most so if whole blocks are missing,
      which is assumed.
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
    per_fetch = fetch_size / block_size
    found = [
        Deviation(
            "labels mixed inside blocks",
            min(within_block_bits, room),
            f"labels are mixed inside blocks ({within_block_bits:.2f} bits within one)",
        ),
        Deviation(
            "few blocks",
            min(bias, room, most - usual),
            f"there are few blocks ({n_blocks:,} for {counts.size:,} labels, "
            f"{per_fetch:{',.0f' if per_fetch >= 1 else '.2g'}} per fetch)",
        ),
        Deviation(
            "partial last fetch",
            partial / n_rows * (usual - homogeneous(f=in_partial)) if partial else 0.0,
            f"the last fetch is partial ({partial / n_rows:.0%} of all cells)",
        ),
        Deviation(
            "short last block",
            2 * abs(homogeneous(n=n_rows) - usual) if short else 0.0,
            f"the last block is short ({short:,} cells), so fetches split blocks",
        ),
        Deviation(
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
    """Return the standard error of the mean over rounds of whole fetches, the larger of two.

    The spread of the rounds themselves is misleading if they happen to be alike, for example when
    most minibatches hold a single label; the spread of as many planned fetches is not. Fetches of
    one epoch share its rows: what one has in surplus, the others lack. If a fetch's entropy is a
    quadratic function of such surpluses, as it is near the collection's frequencies, those of N
    fetches correlate by 1 / (N - 1)^2, and the variance of their mean is N / (N - 1) times that of
    independent ones. Consecutive fetches within one block count as one.
    """
    n = fetches_per_epoch
    shared = n / (n - 1) if n > 1 else 1.0
    independent = max(1.0, n_rounds * fetches_per_round / fetches_per_block)
    of_plan = planned.deviation * sqrt(shared / independent)
    half = measured.high - measured.value
    if n_rounds < 2 or not isfinite(half):  # noqa: PLR2004 - a spread needs two
        return of_plan
    return max(half / float(stdtrit(n_rounds - 1, (1 + CONFIDENCE) / 2)), of_plan)


def verdict(
    bits: EntropyBits,
    *,
    standard_error: float,
    deviations: Sequence[Deviation],
) -> Verdict | None:
    """Compare the measured entropy of a loader that delivered its plan with the theory.

    A value within sampling error of a bound counts as inside. All figures are plug-in estimates
    over minibatches of the same size, so their biases cancel. Partial fetches are not measured;
    their effect on an epoch is known from the plan.

    Parameters
    ----------
    bits
        The entropy as measured, as planned for whole epochs, and in theory.
    standard_error
        Standard error of the measured entropy.
    deviations
        How the collection deviates from the assumptions of the theory, the largest effect first.
    """
    if bits.measured is None or bits.homogeneous is None:
        return None
    value, exact, epoch = bits.measured.value, bits.homogeneous, bits.expected.value
    error = BEYOND_CHANCE * standard_error + _ROUNDING
    off_exact = _beyond(value, exact, exact, error)
    off = off_exact or _beyond(epoch, exact, exact, error)
    if off and sum(each.bits for each in deviations) + error >= abs(off):
        # A deviation below the standard error would not be visible.
        failing = [each for each in deviations if each.bits > standard_error] or deviations[:1]
        explained = [sum(each.bits for each in failing[:n]) for n in range(1, len(failing))]
        enough = sum(bits + error < abs(off) for bits in explained) + 1
        facts = " and ".join(each.fact for each in failing[:enough])
        got = f"{value:.3f} were measured, as planned"
        if not off_exact:
            got = f"a whole epoch of the plan has {epoch:.3f}"
        return Verdict(
            kind="assumptions",
            bits=off,
            error_bits=error,
            assumptions=tuple(each.assumption for each in failing),
            sentence=f"The theory does not apply because {facts}: it expects {exact:.3f} bits, but "
            f"{got}.",
        )
    low, high = bits.bounds
    whose = "the paper's bounds"
    if (low, high) != (bits.lower_bound, bits.upper_bound):
        whose += ", widened to exact values"
    bounds = f"{whose} ({low:.3f} to {high:.3f})"
    if not off_exact:
        return Verdict(
            kind="inside",
            error_bits=error,
            sentence=f"Measured {value:.3f} bits, as planned: within sampling noise of the theory "
            f"({exact:.3f}) and inside {bounds}.",
        )
    # The bounds include the exact expectation, so a value outside them is off it, too.
    off_bounds = _beyond(value, low, high, error)
    where = f"{off_bounds:+.3f} outside {bounds}, and" if off_bounds else f"inside {bounds}, but"
    return Verdict(
        kind="outside",
        bits=off_bounds or off_exact,
        error_bits=error,
        sentence=f"Measured {value:.3f} bits, as planned, {where} {off_exact:+.3f} off the exact "
        f"expectation ({exact:.3f}), although no assumption is known to fail.",
    )


def _beyond(value: float, low: float, high: float, error: float) -> float:
    """Return how far a value lies outside a range, 0 if within the error."""
    distance = max(low - value, value - high)
    return copysign(distance, value - low) if distance > error else 0.0
