"""Which rows come when: strategies, and the plan of an epoch."""

from cellfeed.sampling._plan import EpochPlan, Fetch
from cellfeed.sampling._strategies import BlockShuffling, SamplingStrategy, Streaming

__all__ = ["BlockShuffling", "EpochPlan", "Fetch", "SamplingStrategy", "Streaming"]
