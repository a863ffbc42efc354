"""Strategies that draw cells by weight or by class, or that visit sets of cells of one group.

`cellfeed` has them under the same names.
"""

from cellfeed.strategies._grouped import GroupedSampling
from cellfeed.strategies._weighted import BlockWeightedSampling, ClassBalancedSampling

__all__ = ["BlockWeightedSampling", "ClassBalancedSampling", "GroupedSampling"]
