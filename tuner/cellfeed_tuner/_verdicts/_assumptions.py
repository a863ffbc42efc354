"""Where a collection departs from what theory assumes, and how much that may matter.

Theory (`theory.expected_entropy_bits`, and the paper's bounds) assumes that each block holds one
label, drawn independently of all others; that blocks are whole; that fetches are whole; and that
all rows have a label. No collection is quite like that, so each departure is given in bits, to be
held against what a measurement can tell apart.
"""

from dataclasses import dataclass
from math import log, log2

from cellfeed_tuner import theory
from cellfeed_tuner._entropy._label_counts import LabelCounts
from cellfeed_tuner._results._configuration_result import Assumption

__all__ = ["Departure", "departures"]


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
