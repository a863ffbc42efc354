"""Where a collection departs from what theory assumes, and how much that may matter.

Theory (`theory.expected_entropy_bits`, and the paper's bounds) assumes that each block holds one
label, drawn independently of all others; that blocks are whole; that fetches are whole; and that
all rows have a label. No collection is quite like that, so each departure is given in bits, to be
held against what a measurement can tell apart.
"""

from dataclasses import dataclass
from math import log, log2
from typing import Literal

from cellfeed_tuner import theory
from cellfeed_tuner._entropy._label_counts import LabelCounts

__all__ = ["Assumption", "Departure", "departures"]

Assumption = Literal[
    "labels mixed inside blocks",
    "few blocks",
    "partial last fetch",
    "short last block",
    "missing labels",
]
"""What can keep theory from applying, named by what is found instead of what is assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """One assumption that does not hold exactly.

    Parameters
    ----------
    assumption
        Which one.
    bits
        By about how much it may shift the mean entropy of minibatches, at most.
    fact
        What was found, in words.
    """

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

    Parameters
    ----------
    counted
        Rows of each label.
    within_block_bits
        Mean label entropy within a block; see `block_mixing`.
    batch_size, block_size, fetch_factor
        The configuration.

    Returns
    -------
    Departures whose effect is not nil.
    """
    n_rows, counts = counted.n_rows, counted.counts
    fetch_size = batch_size * fetch_factor

    def homogeneous(m: int = batch_size, f: int = fetch_factor, n: int | None = None) -> float:
        return theory.expected_entropy_bits(counts, m, block_size, f, n_rows=n)

    usual = homogeneous()
    random = counted.random_entropy_bits(batch_size)
    room = max(0.0, random - usual)
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
            assumption="labels mixed inside blocks",
            bits=min(within_block_bits, room),
            fact=f"labels are mixed inside blocks ({within_block_bits:.2f} bits within one)",
        ),
        Departure(
            assumption="few blocks",
            bits=min(bias, room, most - usual),
            fact=(
                f"there are few blocks ({n_blocks:,} of {counts.size:,} labels, "
                f"{fetch_size / block_size:,.3g} to a fetch)"
            ),
        ),
        Departure(
            assumption="partial last fetch",
            bits=partial / n_rows * (usual - homogeneous(f=in_partial)) if partial else 0.0,
            fact=f"the last fetch is partial ({partial / n_rows:.0%} of all cells)",
        ),
        Departure(
            assumption="short last block",
            bits=2 * abs(homogeneous(n=n_rows) - usual) if short else 0.0,
            fact=f"the last block is short ({short:,} cells), so that fetches cut blocks",
        ),
        Departure(
            assumption="missing labels",
            bits=usual - homogeneous(m=known_rows) if counted.n_missing else 0.0,
            fact=f"labels are missing in {share_missing:.1%} of all cells",
        ),
    ]
    return sorted((each for each in found if each.bits > 0), key=lambda each: -each.bits)
