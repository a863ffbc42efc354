"""Dividing reads by destination, so that some groups can be used before the others."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cellfeed._buffers import groups_of
from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._reads import ChunkReads

__all__ = ["divide_reads"]


def divide_reads(reads: ChunkReads, is_first: NDArray[np.bool_]) -> tuple[ChunkReads, ChunkReads]:
    """Divide reads into the chunks of some groups of rows, and the remaining chunks.

    Running both parts, one after the other, is equivalent to the original reads. A chunk in the
    first part is decoded there for other groups too.

    Parameters
    ----------
    reads
        Reads without `ValueSteps`.
    is_first
        Whether each group is complete after the first part, shape (n_groups,).
    """
    table, segments = reads.chunks, reads.segments
    n_segments = table[:, kernels.END_SEGMENT] - table[:, kernels.FIRST_SEGMENT]
    n_before = np.append(0, np.cumsum(is_first[groups_of(segments[:, kernels.TO])]))
    of_first = n_before[table[:, kernels.END_SEGMENT]] > n_before[table[:, kernels.FIRST_SEGMENT]]

    def part(*, first: bool) -> ChunkReads:
        are_in = of_first == first
        chunks, ends = table[are_in], np.cumsum(n_segments[are_in])
        chunks[:, kernels.FIRST_SEGMENT] = ends - n_segments[are_in]
        chunks[:, kernels.END_SEGMENT] = ends
        crossings = {
            itemsize: addresses[is_first[groups_of(addresses)] == first]
            for itemsize, addresses in reads.crossings.items()
        }
        own = segments[np.repeat(are_in, n_segments)]
        return replace(reads, chunks=chunks, segments=own, crossings=crossings)

    return part(first=True), part(first=False)
