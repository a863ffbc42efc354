"""Whether rows are stored shuffled already, so that large blocks mix as well as small ones."""

from dataclasses import dataclass

from cellfeed_tuner._entropy._label_entropy import LabelEntropy
from cellfeed_tuner._interval import BEYOND_CHANCE

__all__ = ["StorageOrder", "storage_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOrder:
    """What large blocks cost where mixing is hardest, with one minibatch to a fetch.

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
        How far below it rows in random order may come by chance.
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
        """What this means, in one sentence."""
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


def storage_order(
    in_blocks: LabelEntropy, single_rows: LabelEntropy, *, random_bits: float, n_distinct: int
) -> StorageOrder:
    """Return what large blocks cost in entropy, and whether that is no more than chance.

    If rows are stored in random order, the minibatches of one epoch are random samples that
    share no row. The mean over G of them has the deviation of one, which a replay of single rows
    gives, over the root of G. Going through more than one epoch adds none that are new, so G is
    never more than the ``n_distinct`` minibatches of an epoch. Both replays are at fetch factor 1.
    """
    # One minibatch to a fetch, so that fetches are minibatches.
    deviation = single_rows.whole_fetches.deviation if single_rows.whole_fetches else 0.0
    n = min(in_blocks.n_minibatches, max(1, n_distinct))
    return StorageOrder(
        block_size=in_blocks.block_size,
        expected_bits=in_blocks.bits.value,
        random_bits=random_bits,
        tolerance_bits=BEYOND_CHANCE * deviation / n**0.5,
    )
