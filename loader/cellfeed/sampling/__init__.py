"""Sampling strategies, the plan of an epoch, and building blocks for strategies of your own.

A `SamplingStrategy` maps the positions of an epoch to rows; an `EpochPlan` divides the positions
among ranks, fetches and minibatches. Randomness is counter-based: each draw depends only on a key
and a number, without state.
"""

from cellfeed.sampling._base import ABSENT_BY_DEFAULT, EpochOrder, SamplingStrategy
from cellfeed.sampling._block_shuffling import BlockShuffling
from cellfeed.sampling._block_sizes import BlockSizes
from cellfeed.sampling._chunk_starts import ChunkStarts
from cellfeed.sampling._chunked_rows import ChunkedRows
from cellfeed.sampling._class_balanced import ClassBalancedSampling
from cellfeed.sampling._grouped import GroupedSampling
from cellfeed.sampling._permutation import Permutation
from cellfeed.sampling._plan import EpochPlan, Fetch, Share
from cellfeed.sampling._progress import Progress
from cellfeed.sampling._random import derive_key, random_below, random_words
from cellfeed.sampling._streaming import Streaming
from cellfeed.sampling._weighted import BlockWeightedSampling

__all__ = [
    "ABSENT_BY_DEFAULT",
    "BlockShuffling",
    "BlockSizes",
    "BlockWeightedSampling",
    "ChunkStarts",
    "ChunkedRows",
    "ClassBalancedSampling",
    "EpochOrder",
    "EpochPlan",
    "Fetch",
    "GroupedSampling",
    "Permutation",
    "Progress",
    "SamplingStrategy",
    "Share",
    "Streaming",
    "derive_key",
    "random_below",
    "random_words",
]
