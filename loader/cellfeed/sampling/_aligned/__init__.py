"""Blocks that begin where chunks do, in random order: imported where they are asked for.

Every function that is compiled is in this folder, which takes nothing that is compiled from
elsewhere.
"""

from cellfeed.sampling._aligned._blocks import AlignedBlocks

__all__ = ["AlignedBlocks"]
