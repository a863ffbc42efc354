"""Sampling strategies, the plan of an epoch, and building blocks for strategies of your own.

A `SamplingStrategy` maps the positions of an epoch to rows; an `EpochPlan` divides the positions
among ranks, fetches and minibatches. Randomness is counter-based: each draw depends only on a key
and a number, without state.
"""

from cellfeed.sampling._base import (
    ABSENT_BY_DEFAULT,
    BlockSizes,
    ChunkedRows,
    EpochOrder,
    MatchedOrder,
    Progress,
    SamplingStrategy,
    WithOthers,
    n_available,
    require_row_numbers,
    sorted_indices,
)
from cellfeed.sampling._block_shuffling import BlockShuffling, ChunkStarts, Streaming
from cellfeed.sampling._labels import (
    column_of,
    combined_codes,
    factorized,
    label_codes,
)
from cellfeed.sampling._permutation import (
    Permutation,
    derive_key,
    permute_within,
    random_below,
    random_words,
)
from cellfeed.sampling._plan import EpochPlan, Fetch, Share

__all__ = [
    "ABSENT_BY_DEFAULT",
    "BlockShuffling",
    "BlockSizes",
    "ChunkStarts",
    "ChunkedRows",
    "EpochOrder",
    "EpochPlan",
    "Fetch",
    "MatchedOrder",
    "Permutation",
    "Progress",
    "SamplingStrategy",
    "Share",
    "Streaming",
    "WithOthers",
    "column_of",
    "combined_codes",
    "derive_key",
    "factorized",
    "label_codes",
    "n_available",
    "permute_within",
    "random_below",
    "random_words",
    "require_row_numbers",
    "sorted_indices",
]
